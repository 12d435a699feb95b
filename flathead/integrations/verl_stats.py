"""verl's vocabulary functions, under verl's names and signatures, as thin calls of Flathead.

Every value is fp32 (fp64 for fp64 input), whatever the dtype of the logits: an entropy of 11 rounded to bf16 is off by
up to 0.03. What a call does not say and verl's configuration does (the chunk size; whether the fused path should
also make the sum of squares) comes from the micro-batch at work: `Call`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flathead.token_stats import TokenStats, linear_token_stats, token_stats
from flathead.vocab_shard import VocabShard, is_dtensor


@dataclass
class Call:
    """What one micro-batch asks of the functions its engine calls, and what they leave for the engine.

    names: of the statistics, as TokenStats calls them. chunk_size: rows at a time, None for the default budget.
    """

    names: tuple[str, ...] = ("log_prob", "entropy")
    chunk_size: int | None = None
    sum_pi_squared: Tensor | None = None  # from the fused head, which has no place to return it


_CALL: ContextVar[Call | None] = ContextVar("flathead_verl_call", default=None)


@contextmanager
def answering(call: Call) -> Iterator[Call]:
    """Inside, the functions of this module work for this micro-batch."""
    token = _CALL.set(call)
    try:
        yield call
    finally:
        _CALL.reset(token)


def current_call() -> Call:
    return _CALL.get() or Call()


# verl compiles some of these: Flathead runs as it is inside a compiled function.
@torch.compiler.disable
def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """ln softmax(logits)[label]. logits (..., V), labels (...) -> (...).

    inplace_backward only ever had an effect with flash-attn, and there spoilt the logits for an entropy of the same;
    the engines overwrite them where nothing else reads them, and this function never.
    """
    return _log_prob(logits, labels)


@torch.compiler.disable
def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    """`logprobs_from_logits`."""
    return _log_prob(logits, labels)


@torch.compiler.disable
def logprobs_from_logits_v2(logits: Tensor, labels: Tensor) -> Tensor:
    """`logprobs_from_logits`."""
    return _log_prob(logits, labels)


@torch.compiler.disable
def entropy_from_logits(logits: Tensor) -> Tensor:
    """entropy = -sum p ln p. logits (..., V) -> (...)."""
    return _one(token_stats(logits, None, stats=("entropy",), chunk_size=current_call().chunk_size))


@torch.compiler.disable
def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`entropy_from_logits`, `chunk_size` rows at a time, of logits of any shape; the same bits."""
    return _one(token_stats(logits, None, stats=("entropy",), chunk_size=chunk_size))


@torch.compiler.disable
def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """sum p^2. logits (..., V) -> (...)."""
    return _one(token_stats(logits, None, stats=("sum_pi_squared",), chunk_size=current_call().chunk_size))


def fused_linear_for_ppo(
    self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """`FusedLinearForPPO.forward`: hidden (..., H), weight (V, H), ids (...) -> log_prob (...), entropy (...) if asked.

    verl's tile of 512 tokens (`self.chunk_size`) has no part in it: tiles come from the budget, or from
    entropy_from_logits_chunk_size.
    """
    return _from_hidden(hidden_states, vocab_weights, input_ids, temperature, None)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """hidden (B, T, H), or (T, B, H) as Megatron has it, weight (V / tp, H), labels (B, T) -> two of labels' shape.

    hidden's gradient comes out whole on every rank; where Megatron's gather over sequence parallel ranks follows, which
    sums what it scatters, it comes out divided by their number. (verl's kernel leaves the sum to that gather alone:
    without sequence parallelism each rank keeps its own part.)
    """
    if reduction != "none":
        raise ValueError(f"linear_cross_entropy: reduction: expected 'none', the only one verl uses, got {reduction!r}")
    shard = even_shard(dist_process_group, weight.shape[0])
    if shard is not None and _summed_again(hidden):
        ranks = dist.get_world_size(shard.group)
        hidden.register_hook(lambda grad: grad / ranks)
    if hidden.shape[:-1] != labels.shape and hidden.ndim == 3:
        hidden = hidden.transpose(0, 1)
    return _from_hidden(hidden, weight, labels, temperature, shard)


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """entropy = -sum p ln p. logits (..., V / tp) -> (...). One all-gather, none in backward; nothing overwritten."""
    return _parallel(vocab_parallel_logits, None, "entropy", current_call().chunk_size)


def vocab_parallel_entropy_with_chunking(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`vocab_parallel_entropy`, `chunk_size` rows at a time; the same bits, and still one all-gather."""
    return _parallel(vocab_parallel_logits, None, "entropy", chunk_size)


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """ln softmax(logits)[label]. logits (..., V / tp), labels (...) global ids -> (...)."""
    return _parallel(logits, labels.long(), "log_prob", current_call().chunk_size)


def vocab_parallel_sum_pi_squared(vocab_parallel_logits: Tensor) -> Tensor:
    """sum p^2. logits (..., V / tp) -> (...)."""
    return _parallel(vocab_parallel_logits, None, "sum_pi_squared", current_call().chunk_size)


def even_shard(group: dist.ProcessGroup | None, width: int) -> VocabShard | None:
    """Where this rank's columns are: verl's Megatron shards are even, padding included."""
    if group is None or dist.get_world_size(group) == 1:
        return None
    return VocabShard.from_group(group, width)


def tensor_parallel_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()  # type: ignore[return-value]  # declared group | int


def _log_prob(logits: Tensor, labels: Tensor) -> Tensor:
    return _one(token_stats(logits, labels.long(), stats=("log_prob",), chunk_size=current_call().chunk_size))


def _summed_again(hidden: Tensor) -> bool:
    """Whether hidden comes from Megatron's gather whose backward is a reduce-scatter."""
    from megatron.core.tensor_parallel import mappings

    made_by: Any = hidden.grad_fn  # an autograd function's backward node is its context
    gather = mappings._GatherFromSequenceParallelRegion._backward_cls
    return isinstance(made_by, gather) and made_by.tensor_parallel_output_grad


def _parallel(logits: Tensor, labels: Tensor | None, name: str, chunk_size: int | None) -> Tensor:
    shard = even_shard(tensor_parallel_group(), logits.shape[-1])
    return _one(token_stats(logits, labels, stats=(name,), shard=shard, chunk_size=chunk_size))


def _from_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, shard: VocabShard | None
) -> tuple[Tensor, Tensor | None]:
    call = current_call()
    stats = linear_token_stats(
        hidden,
        _whole(weight) if is_dtensor(weight) else weight,
        labels.long(),
        temperature=temperature,
        stats=call.names,
        shard=shard,
        chunk_size=call.chunk_size,
    )
    call.sum_pi_squared = stats.sum_pi_squared
    assert stats.log_prob is not None
    return stats.log_prob, stats.entropy


def _whole(weight: Any) -> Tensor:
    """An untied head, which verl shards by itself under FSDP2 (and then reads from outside) -> all of it.

    Its gradient is the mean over the ranks, as FSDP makes it of every other.
    """
    from torch.distributed.tensor import Partial

    ranks = weight.device_mesh.size()
    whole = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / ranks)
    return whole


def _one(stats: TokenStats) -> Tensor:
    return next(value for value in vars(stats).values() if value is not None)
