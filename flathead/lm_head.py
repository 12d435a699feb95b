"""A Hugging Face causal LM's head: read once, here, and replaced by the flat one.

A Hugging Face forward ends in `logits = head(hidden)`, then a scale or a soft cap, then `self.loss_function(logits,
labels)`. Flathead runs that very forward, but puts two things in their place while it runs: the head's product, which
becomes a function of the hidden states, and the loss. Everything before, between and after stays the model's own:
masks, caches, checkpointing, hooks, the auxiliary loss of a mixture of experts.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flathead.arguments import check_stats, check_temperature
from flathead.token_stats import TokenStats, linear_token_stats

HuggingFaceModel = Any  # a transformers.PreTrainedModel: transformers is optional here
_STATS = {"log_prob": "log_probs", "entropy": "entropy", "sum_pi_squared": "sum_pi_squared", "logsumexp": "logsumexp"}
_MULTIPLIES = ("hyperclovax",)  # where config.logits_scaling multiplies; in the Granite family it divides
_PROBE_REACH = 100.0  # logits up to here: far beyond any soft cap, so that one cannot hide in its linear part


@dataclass(frozen=True)
class Head:
    """logits (..., V) = softcap(logit_scale * (hidden @ weight.T + bias)), softcap(x) = cap * tanh(x / cap).

    weight (V, H), or V_local rows of it as a DTensor `Shard(0)`, which carries its own sharding.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def form(self) -> dict[str, Any]:
        """What `token_stats` and `linear_token_stats` need to know besides the numbers themselves."""
        return {"softcap": self.softcap, "logit_scale": self.logit_scale}


def check_head(model: HuggingFaceModel) -> None:
    """Errors: ValueError unless the logits of this model are the product of its hidden states with a linear layer.

    That leaves out encoder-decoders, and heads wrapped by an adapter or quantized: merge or dequantize those first.
    """
    name = type(model).__name__
    if not callable(getattr(model, "get_output_embeddings", None)) or not hasattr(model, "config"):
        raise ValueError(f"model: expected a Hugging Face causal LM, got {name}")
    head = model.get_output_embeddings()
    if head is None or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model: expected a causal LM (AutoModelForCausalLM), got {name}, which has no such head")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise ValueError(
            f"model: expected a plain nn.Linear as the head of {name}, got {type(head).__name__}; "
            "merge adapters or dequantize the head first"
        )


def check_model(model: HuggingFaceModel) -> None:
    """Errors: ValueError unless logits and loss of this model come about as this module says (see `install`)."""
    check_head(model)
    signature = inspect.signature(model.forward)
    if "labels" not in signature.parameters:
        raise ValueError(f"model: expected a causal LM with `labels`, got {type(model).__name__}{signature}")
    if all(type(p) in (nn.Parameter, Tensor) and not p.is_meta for p in model.parameters()):
        _probe(model)


def read_head(model: HuggingFaceModel) -> Head:
    """The head as it is now: under FSDP, whole only inside the model's forward."""
    module, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    scale *= scaling if config.model_type in _MULTIPLIES else 1.0 / scaling
    return Head(module.weight, module.bias, getattr(config, "final_logit_softcapping", None), scale)


@contextmanager
def replaced_head(model: HuggingFaceModel, head_fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, the model's forward calls `head_fn(hidden)` instead of its head's product."""
    head = model.get_output_embeddings()
    head.forward = head_fn
    try:
        yield
    finally:
        del head.forward


@contextmanager
def replaced_loss(model: HuggingFaceModel, loss_fn: Callable[..., Tensor]) -> Iterator[None]:
    before = vars(model).get("_loss_function")
    model.loss_function = loss_fn
    try:
        yield
    finally:
        del model._loss_function
        if before is not None:
            model.loss_function = before


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, without gradient and in evaluation mode; every module finds its own mode again."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training


def no_logits(hidden: Tensor) -> Tensor:
    """(B, T, H) -> (B, 0, 1): stands where the forward expects logits, so that what it does to them costs nothing."""
    return hidden.new_empty(hidden.shape[0], 0, 1)


@dataclass(eq=False)
class FlatForward:
    """`model.forward` of an installed model: the stock one without labels, the flat one with them.

    An object rather than a closure, so that copying or pickling a model takes along its own.
    """

    model: HuggingFaceModel
    stock: Callable[..., Any]
    __signature__: inspect.Signature = field(repr=False)

    def __call__(
        self, *args: Any, temperature: float | Tensor | None = None, stats: tuple[str, ...] | None = None, **kwargs: Any
    ) -> Any:
        given = self.__signature__.bind(*args, **kwargs).arguments
        labels = given.get("labels")
        if labels is None:
            if temperature is not None or stats is not None:
                raise ValueError("labels: expected when temperature or stats is given, got None; pass labels=input_ids")
            return self.stock(*args, **kwargs)
        stats = ("log_prob", "entropy") if stats is None else stats
        _check_call(given, labels, 1.0 if temperature is None else temperature, stats)
        kwargs_as_dict = {**kwargs, "return_dict": True}
        run = _FlatRun(self.model, 1.0 if temperature is None else temperature, tuple(stats))
        with replaced_head(self.model, run.head), replaced_loss(self.model, run.loss):
            stock = self.stock(*args, **kwargs_as_dict)
        values = {_STATS[name]: getattr(run.stats_BT, name) for name in run.names}
        fields = {name: value for name, value in stock.items() if name != "logits"}
        output = _output_class(type(stock))(**fields, **values)
        return_dict = kwargs.get("return_dict")
        return_dict = getattr(self.model.config, "return_dict", True) if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


@dataclass(eq=False)
class _FlatRun:
    """One forward: keeps the hidden states from where the head was, and answers where the loss is asked for."""

    model: HuggingFaceModel
    temperature: float | Tensor
    names: tuple[str, ...]
    hidden_BTH: Tensor | None = None
    stats_BT: TokenStats = field(default_factory=TokenStats)

    def head(self, hidden_BTH: Tensor) -> Tensor:
        self.hidden_BTH = hidden_BTH
        return no_logits(hidden_BTH)

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Hugging Face's causal LM loss, with its parameters: -sum(log_prob) / (labels counted, or num_items)."""
        assert self.hidden_BTH is not None
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(self.hidden_BTH.device)
        head = read_head(self.model)
        self.stats_BT = linear_token_stats(
            self.hidden_BTH,
            head.weight,
            shift_labels,
            bias=head.bias,
            temperature=self.temperature,
            stats=tuple(dict.fromkeys(("log_prob", *self.names))),
            ignore_index=ignore_index,
            **head.form,
        )
        assert self.stats_BT.log_prob is not None
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != ignore_index).sum()
        elif isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(self.hidden_BTH.device)
        return -self.stats_BT.log_prob.sum() / num_items_in_batch


def install(model: HuggingFaceModel) -> HuggingFaceModel:
    """Replaces the LM head of a Hugging Face causal LM by the flat one, in place; returns the model.

    Afterwards `model(ids, labels=..., temperature=1.0, stats=("log_prob", "entropy"))` gives `.log_probs`, `.entropy`
    (B, T) in fp32, `.loss` and no `.logits`. Labels are Hugging Face's: positions of `ids`, shifted inside, -100
    ignored; entry t speaks of token t + 1 and the last entry is 0. `.loss` is the model's own loss (of the tempered
    distribution). temperature: a number, or a tensor that broadcasts to (B, T). Without labels nothing has changed.

    Errors: ValueError for a model that is no causal LM, has this already, computes its loss in another way, or does
    something to its logits that is not known here. The last two are found by running the model on four tokens,
    which needs its weights: a model on the meta device or already sharded is taken at its config's word.
    """
    if isinstance(vars(model).get("forward"), FlatForward):
        raise ValueError(f"install: this {type(model).__name__} has the flat head already; uninstall(model) undoes it")
    check_model(model)
    signature = inspect.signature(model.forward)
    model.forward = FlatForward(model, model.forward, _with_options(signature))
    return model


def uninstall(model: HuggingFaceModel) -> HuggingFaceModel:
    """Undoes `install`, in place; returns the model. Errors: ValueError when there is nothing to undo."""
    flat = vars(model).get("forward")
    if not isinstance(flat, FlatForward):
        raise ValueError(
            f"uninstall: expected a model that install() was called on, got {type(model).__name__} with "
            + ("its own forward" if flat is None else "a forward that was replaced since; undo that first")
        )
    if getattr(flat.stock, "__func__", None) is type(model).forward:
        del model.forward
    else:
        model.forward = flat.stock
    return model


def _check_call(given: dict[str, Any], labels: Any, temperature: Any, stats: Any) -> None:
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels: expected an int64 tensor, got {type(labels).__name__}")
    check_stats(stats)
    check_temperature(temperature)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if isinstance(tokens, Tensor) and labels.shape != tokens.shape[:2]:
        raise ValueError(f"labels.shape: expected {tuple(tokens.shape[:2])} as the input, got {tuple(labels.shape)}")
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep != 0:
        raise ValueError(
            "logits_to_keep: expected none with labels (there are no logits), got one; mask labels by -100"
        )


def _with_options(signature: inspect.Signature) -> inspect.Signature:
    """The stock signature plus our two options, so that whoever reads it (the Trainer does) sees all of it."""
    ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("temperature", "stats")]
    parameters = list(signature.parameters.values())
    at = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*parameters[:at], *ours, *parameters[at:]])


@cache
def _output_class(stock: type) -> type:
    """The model's own output class with fields for the statistics."""
    fields = [(name, Tensor | None, None) for name in _STATS.values()]
    return make_dataclass(f"Flat{stock.__name__}", fields, bases=(stock,))


def _probe(model: HuggingFaceModel) -> None:
    """Runs the model on four tokens and refuses it unless head and loss are what this module takes them for.

    The head must give hidden @ weight.T + bias for every token, the forward must make softcap(scale * logits) of it
    (shown large logits, where every nonlinearity tells), and hand that to Hugging Face's causal LM loss.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    name = type(model).__name__
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(f"model: expected Hugging Face's causal LM loss, got {model.loss_function} in {name}")
    head = read_head(model)
    ids = torch.zeros(1, 4, dtype=torch.long, device=head.weight.device)
    shown = torch.linspace(-_PROBE_REACH, _PROBE_REACH, 4 * len(head.weight), device=ids.device)
    shown = shown.view(1, 4, -1).to(head.weight.dtype)
    seen: dict[str, Any] = {"heads": 0}

    def head_fn(hidden: Tensor) -> Tensor:
        seen["heads"], seen["hidden"] = seen["heads"] + 1, hidden.shape[:-1]
        return shown

    def loss_fn(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        seen["logits"] = logits
        return logits.new_zeros(())

    with evaluating(model), replaced_head(model, head_fn), replaced_loss(model, loss_fn):
        model(input_ids=ids, labels=ids)
    if seen["heads"] != 1 or seen["hidden"] != ids.shape or "logits" not in seen:
        raise ValueError(f"model: {name} does not make its loss from one product of its head with every hidden state")
    expected = shown * head.logit_scale
    expected = expected if head.softcap is None else torch.tanh(expected / head.softcap) * head.softcap
    tolerance = 4 * torch.finfo(shown.dtype).eps
    if seen["logits"].shape != shown.shape or not torch.allclose(
        seen["logits"].to(expected.dtype), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    ):
        raise ValueError(
            f"model: {name} changes its logits in a way Flathead does not know: expected softcap({head.softcap}) of "
            f"{head.logit_scale} * logits, got something else"
        )
