"""TRL's per-token log-probabilities and entropies by Flathead: `import flathead.integrations.trl` is all.

TRL's GRPO and RLOO trainers give their model a second forward (`trl.trainer.utils.add_fused_lm_head`), which hands
hidden states, the head's weight and its form (bias, scale, soft cap, temperature) to one autograd function. That
function's place is taken here by `linear_token_stats`; what reads the model stays TRL's own. TRL leaves out the tokens
beyond the completion mask only where it has Triton; here they are left out everywhere. The functions TRL calls where it
does have logits, in some experimental trainers, become `token_stats`.
"""

import inspect
import logging
from types import CodeType

import torch
from torch import Tensor

from flathead.integrations.replacing import Replacement, Site
from flathead.token_stats import linear_token_stats, token_stats

log = logging.getLogger("flathead")

_STATS = {"log_probs": "log_prob", "entropy": "entropy", "log_sum_sq_probs": "sum_pi_squared"}
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # TRL's default
_UTILS = "trl.trainer.utils"
_told: set[str] = set()


class HeadLogProbs:
    """In the place of TRL's `ChunkedLogProbFunction`, of which only `apply` is ever called."""

    @staticmethod
    @torch.compiler.disable  # it reads values of tensors: one break in a compiled forward instead of a dozen
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """hidden (N, H), weight (V, H), targets (N) -> log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1.

        Each (N) in fp32, None where not asked for. They speak of softmax(softcap(logit_scale * logits) / temperature)
        with logits = hidden @ weight.T + bias. Gradients: through log_probs and entropy, as TRL's own. chunk_size, the
        width of TRL's tiles, has no effect: the tiles are Flathead's. What Flathead does not compute goes to TRL's own.
        """
        if reason := _left_to_trl(weight, outputs):
            _tell_once(reason)
            stock = _REPLACEMENT.stock("_ChunkedLogProbFunction")
            form = (final_logit_softcapping, logit_scale, outputs)
            return stock.apply(hidden, weight, bias, targets, temperature, chunk_size, *form)
        if not torch.is_autocast_enabled(hidden.device.type):  # as TRL does; under autocast tiles are cast one by one
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        stats = linear_token_stats(
            hidden,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            stats=tuple(_STATS[name] for name in dict.fromkeys(("log_probs", *outputs))),
            softcap=final_logit_softcapping,
            logit_scale=logit_scale,
        )
        squares = stats.sum_pi_squared
        return stats.log_prob, stats.entropy, None if squares is None else squares.detach().log(), None, None


def score_live_tokens_only(device: torch.device) -> bool:
    """In the place of `_use_triton` in trl.trainer.utils, which decides there whether masked tokens are left out."""
    return True


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """ln softmax(logits / temperature)[index]. logits (..., V), index (...) or (..., K) -> index's shape, in fp32.

    row_mask, of index's shape: where it is 0 the result is 0, without gradient.
    """
    if index.ndim == logits.ndim:
        logsumexp = token_stats(logits, None, temperature=temperature, stats=("logsumexp",)).logsumexp
        assert logsumexp is not None
        log_prob = logits.gather(-1, index).to(logsumexp.dtype) / temperature - logsumexp.unsqueeze(-1)
        return log_prob if row_mask is None else log_prob.masked_fill(row_mask == 0, 0.0)
    log_prob = token_stats(logits, _labels(index, row_mask), temperature=temperature, stats=("log_prob",)).log_prob
    assert log_prob is not None
    return log_prob


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """-sum p ln p. logits (..., V) -> (...) in fp32. chunk_size, TRL's rows at a time, changes no bit of it."""
    entropy = token_stats(logits, None, stats=("entropy",), chunk_size=chunk_size).entropy
    assert entropy is not None
    return entropy


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both of the above for index (...), of logits / temperature, in one pass."""
    stats = token_stats(logits, _labels(index, row_mask), temperature=temperature)
    assert stats.log_prob is not None and stats.entropy is not None
    return stats.log_prob, stats.entropy if entropy_requires_grad else stats.entropy.detach()


def _labels(index: Tensor, row_mask: Tensor | None) -> Tensor:
    return index.long() if row_mask is None else index.long().masked_fill(row_mask == 0, -100)


def _left_to_trl(weight: Tensor, outputs: tuple[str, ...]) -> str | None:
    """Why TRL's own function computes this; None: Flathead does."""
    if unknown := [name for name in outputs if name not in _STATS]:
        return f"asked for {', '.join(unknown)}, which Flathead does not compute"
    if hasattr(weight, "ds_id"):
        return "under DeepSpeed ZeRO-3 the head is whole only inside TRL's own function"
    return None


def _tell_once(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        log.info("flathead: left to TRL's own function: %s", reason)


def _head_decides_by_the_names() -> str | None:
    """`_use_triton` may be replaced in trl.trainer.utils only if nothing but the fused head reads it there."""
    from trl.trainer import utils

    functions = {name: f for name, f in vars(utils).items() if inspect.isfunction(f) and f.__module__ == _UTILS}
    for name in ("_use_triton", "_ChunkedLogProbFunction"):
        readers = [key for key, function in functions.items() if name in _names(function.__code__)]
        if readers != ["add_fused_lm_head"]:
            return f"{_UTILS}.{name}: expected to be read by add_fused_lm_head alone, got {readers or 'no function'}"
    return None


def _names(code: CodeType) -> set[str]:
    """Global names that a function reads, and those of the functions within it."""
    within = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*within)


_HEAD = "hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
_BOTH = "logits index entropy_requires_grad temperature row_mask"
_REPLACEMENT = Replacement(
    host="TRL",
    distribution="trl",
    tested_versions=("1.16.0",),
    package="trl",
    sites=(
        Site(_UTILS, "_ChunkedLogProbFunction", tuple(_HEAD.split()), HeadLogProbs),
        Site(_UTILS, "_use_triton", ("device",), score_live_tokens_only, only_here=True),
        Site(_UTILS, "selective_log_softmax", ("logits", "index", "temperature", "row_mask"), selective_log_softmax),
        Site(_UTILS, "entropy_from_logits", ("logits", "chunk_size"), entropy_from_logits),
        Site(_UTILS, "selective_log_softmax_and_entropy", tuple(_BOTH.split()), selective_log_softmax_and_entropy),
    ),
    built=("trl.trainer.base_trainer:_BaseTrainer",),
    check=_head_decides_by_the_names,
)


def apply() -> None:
    """Puts Flathead into TRL, as importing this module does.

    Errors: ModuleNotFoundError without TRL; RuntimeError, with nothing replaced, if a name or signature in TRL is not
    what it was, a trainer has been built already, or this was applied before.
    """
    _REPLACEMENT.apply()


def remove() -> None:
    """Gives TRL its own functions back. Errors: RuntimeError when there is nothing to undo."""
    _REPLACEMENT.remove()


def replaced() -> list[tuple[str, str]]:
    """(TRL's name, what stands there now) of everything replaced; empty after `remove`."""
    return _REPLACEMENT.table()


apply()
