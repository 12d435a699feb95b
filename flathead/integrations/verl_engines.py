"""Methods of verl's engines: every statistic of a micro-batch in one pass over its logits.

verl divides the logits by the temperature into a copy (on Megatron in place, after cloning them for the entropy), then
reads them once for each statistic; without remove-padding it copies them once more. Here the engine's logits go to
`token_stats` as they are, with the temperature, once; the gradient is written over them. From there verl's own steps
follow: gather over sequence parallel ranks, drop padding, one jagged tensor a statistic.

Top-k distillation reads scaled logits itself: it keeps verl's way, through the functions of `verl_stats`.
"""

# pyright: reportMissingImports=false
# verl is not installed where this is checked.

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flathead.integrations.verl_stats import Call, answering, current_call, even_shard, tensor_parallel_group
from flathead.token_stats import TokenStats, token_stats

Engine = Any  # of verl, as its micro-batches (TensorDict): optional here
MicroBatch = Any
Method = Callable[..., Any]

_VERL = {"log_prob": "log_probs", "entropy": "entropy", "sum_pi_squared": "sum_pi_squared"}
_COLDEST = 1e-8  # verl's lower bound of a temperature: padding comes with 0


class Asked(NamedTuple):
    """What a micro-batch asks for: verl's keys, with verl's defaults."""

    calculate_entropy: bool = False
    calculate_sum_pi_squared: bool = False
    use_fused_kernels: bool = False
    use_remove_padding: bool = True
    distillation_use_topk: bool = False
    distillation_only: bool = False

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> "Asked":
        from verl.utils import tensordict_utils as tu

        default = cls()
        return cls(*(bool(tu.get_non_tensor_data(micro_batch, key=k, default=v)) for k, v in default._asdict().items()))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the statistics; a fused head always makes log_prob."""
        wanted = {
            "log_prob": self.use_fused_kernels or not self.distillation_only,
            "entropy": self.calculate_entropy,
            "sum_pi_squared": self.calculate_sum_pi_squared,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def chunk_size_of(engine: Engine) -> int | None:
    config = engine.engine_config
    return config.entropy_from_logits_chunk_size if config.entropy_from_logits_with_chunking else None


def forward_step(stock: Method) -> Method:
    """Of FSDP, VeOmni, Automodel and TorchTitan: verl's own, with the functions it calls told what is asked."""

    def forward_step(self: Engine, micro_batch: MicroBatch, loss_function: Any, forward_only: bool) -> Any:
        with answering(Call(Asked.of(micro_batch).names, chunk_size_of(self))):
            return stock(self, micro_batch, loss_function, forward_only)

    return forward_step


def megatron_forward_step(stock: Method) -> Method:
    """verl's own; the fused path, where verl refuses the sum of squares, returns it beside the others."""

    def forward_step(
        self: Engine, batch_iter: Iterator, model: Any, logits_processor_func: Any, postprocess_micro_batch_func: Any
    ) -> Any:
        micro_batch = next(batch_iter)
        asked = Asked.of(micro_batch)
        asked = asked._replace(use_fused_kernels=bool(self.engine_config.use_fused_kernels))
        if asked.use_fused_kernels:
            micro_batch = _without_sum_pi_squared(micro_batch)
        with answering(Call(asked.names, chunk_size_of(self))) as call:
            run = stock(self, iter([micro_batch]), model, logits_processor_func, postprocess_micro_batch_func)
        if asked.use_fused_kernels and call.sum_pi_squared is not None:
            run[0]["sum_pi_squared"] = call.sum_pi_squared
        return run

    return forward_step


def postprocess_thd_engine(stock: Method) -> Method:
    """In verl's fused Megatron forward: packed -> one jagged tensor, of the sum of squares too if there is one."""

    def postprocess_thd_engine(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if call.sum_pi_squared is not None and not call.sum_pi_squared.is_nested:
            call.sum_pi_squared = stock(call.sum_pi_squared, *args, **kwargs)
        return stock(output, *args, **kwargs)

    return postprocess_thd_engine


def fsdp_outputs(stock: Method) -> Method:
    """`prepare_model_outputs` of FSDP and VeOmni."""

    def prepare_model_outputs(
        self: Engine, output: Any, output_args: dict, micro_batch: MicroBatch, logits_processor_func: Any
    ) -> dict:
        asked = Asked.of(micro_batch)
        if asked.use_fused_kernels:
            rest = _without_sum_pi_squared(micro_batch)
            outputs = stock(self, output, output_args, rest, logits_processor_func)
            if asked.calculate_sum_pi_squared:
                outputs["sum_pi_squared"] = _jagged(self, _left_by_fused_head(self), output_args, micro_batch)
            return outputs
        if asked.distillation_use_topk:
            return stock(self, output, output_args, micro_batch, logits_processor_func)
        labels, temperature = output_args["input_ids_rmpad_rolled"], _temperature(asked, output_args)
        return _outputs(self, asked, output.logits, labels, temperature, output_args, micro_batch)

    return prepare_model_outputs


def automodel_outputs(stock: Method) -> Method:
    def prepare_model_outputs(self: Engine, output: Any, output_args: dict, micro_batch: MicroBatch) -> dict:
        asked = Asked.of(micro_batch)
        if asked.use_fused_kernels:
            return stock(self, output, output_args, micro_batch)
        logits = output if isinstance(output, Tensor) else output.logits
        labels, temperature = output_args["input_ids_rmpad_rolled"], _temperature(asked, output_args)
        return _outputs(self, asked, logits, labels, temperature, output_args, micro_batch)

    return prepare_model_outputs


def torchtitan_outputs(stock: Method) -> Method:
    def prepare_model_outputs(self: Engine, logits: Tensor, output_args: dict, micro_batch: MicroBatch) -> dict:
        asked, temperature = Asked.of(micro_batch), micro_batch["temperature"]
        if isinstance(temperature, Tensor) and temperature.ndim > 0:
            each = micro_batch["input_ids"].offsets().diff()
            temperature = temperature.repeat_interleave(each) if asked.use_remove_padding else temperature.unsqueeze(-1)
        return _outputs(self, asked, logits, output_args["labels"].squeeze(0), temperature, output_args, micro_batch)

    return prepare_model_outputs


def lm_head_logits_processor(stock: Method) -> Method:
    """Of Megatron: logits (B, T, V / tp) -> each statistic (B, T), in one pass and one all-gather, without a clone."""

    def _lm_head_logits_processor(
        self: Engine,
        logits: Tensor,
        label: Tensor,
        temperature: Tensor,
        *,
        calculate_sum_pi_squared: bool,
        calculate_entropy: bool,
        distillation_use_topk: bool,
        distillation_only: bool,
        logits_processor_func: Callable[..., dict],
        batch: MicroBatch,
        data_format: str,
    ) -> dict:
        asked = Asked(calculate_entropy, calculate_sum_pi_squared, distillation_only=distillation_only)
        temperature, outputs = temperature.clamp(min=_COLDEST), {}
        if distillation_use_topk:
            scaled = logits / temperature.unsqueeze(-1).to(logits.dtype)
            outputs.update(logits_processor_func(student_logits=scaled, data=batch, data_format=data_format))
        if asked.names:
            shard = even_shard(tensor_parallel_group(), logits.shape[-1])
            stats = token_stats(
                logits,
                label.long(),
                temperature=temperature,
                stats=asked.names,
                shard=shard,
                chunk_size=chunk_size_of(self),
                inplace_backward=not distillation_use_topk,
            )
            outputs.update(_named(stats))
        return outputs

    return _lm_head_logits_processor


def _outputs(
    engine: Engine,
    asked: Asked,
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    output_args: dict,
    micro_batch: MicroBatch,
) -> dict:
    """Logits (1, N, V), or (B, T, V) with padding, and labels (N) of the packed sequences -> verl's model outputs."""
    if not asked.names:
        return {}
    if asked.use_remove_padding:
        logits = logits.squeeze(0)
    else:
        labels = _padded(labels, logits.shape[:-1], micro_batch)
    if isinstance(temperature, Tensor):
        temperature = temperature.clamp(min=_COLDEST)
    stats = token_stats(
        logits,
        labels.long(),
        temperature=temperature,
        stats=asked.names,
        chunk_size=chunk_size_of(engine),
        inplace_backward=True,
    )
    return {name: _jagged(engine, value, output_args, micro_batch) for name, value in _named(stats).items()}


def _named(stats: TokenStats) -> dict[str, Tensor]:
    return {_VERL[name]: value for name, value in vars(stats).items() if value is not None}


def _temperature(asked: Asked, output_args: dict) -> Tensor:
    if asked.use_remove_padding:
        return output_args["temperature_rmpad"]
    return output_args["temperature"].unsqueeze(-1)


def _filled(shape: torch.Size, micro_batch: MicroBatch) -> Tensor:
    """(B, T): where a padded batch has tokens."""
    offsets = micro_batch["input_ids"].offsets()
    return torch.arange(shape[1], device=offsets.device) < offsets.diff().unsqueeze(1)


def _padded(labels_N: Tensor, shape: torch.Size, micro_batch: MicroBatch) -> Tensor:
    """Labels of the packed sequences -> (B, T), -100 where there is no token."""
    return labels_N.new_full(shape, -100).masked_scatter(_filled(shape, micro_batch), labels_N)


def _jagged(engine: Engine, values: Tensor, output_args: dict, micro_batch: MicroBatch) -> Tensor:
    """(N), (1, N) or (B, T) -> jagged (B, lengths), as every model output of verl."""
    if Asked.of(micro_batch).use_remove_padding:
        values = values.flatten()
        if hasattr(engine, "_gather_and_unpad_packed"):
            values = engine._gather_and_unpad_packed(values, output_args["pad_size"])
    else:
        values = values[_filled(values.shape, micro_batch)]
    return torch.nested.nested_tensor_from_jagged(values, micro_batch["input_ids"].offsets())


def _left_by_fused_head(engine: Engine) -> Tensor:
    left = current_call().sum_pi_squared
    if left is None:
        raise NotImplementedError(
            f"calculate_sum_pi_squared: expected False with use_fused_kernels=True on {type(engine).__name__}, whose "
            "fused head is its own and does not make it; set use_fused_kernels=False"
        )
    return left


def _without_sum_pi_squared(micro_batch: MicroBatch) -> MicroBatch:
    from verl.utils import tensordict_utils as tu

    rest = micro_batch.copy()
    tu.assign_non_tensor(rest, calculate_sum_pi_squared=False)
    return rest
