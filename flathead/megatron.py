"""Drop-in names for vocabulary-parallel logits, as verl's Megatron engine calls them; thin calls of `token_stats`.

The vocabulary is sharded over Megatron's tensor-parallel group, in rank order: logits S(-1)@TP -> replicated@TP.
Logits of any leading shape, left as they are: no clone is needed, and any number of statistics and backward passes may
follow, in any order. Computed in fp32; entropy comes in the logits' dtype, as its callers expect.

One all-gather a call and none in backward. Where the columns' place matters (labels, padding), a second one of a
number a rank tells where each shard begins, so that shards may be uneven; `shard` says it without.
`vocab_size`: the true size, when the last columns are padding.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flathead.token_stats import token_stats
from flathead.vocab_shard import VocabShard

_NO_BOUND = 2**31  # of the vocabulary's size, where only the shards' owners know it


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor, *, vocab_size: int | None = None, shard: VocabShard | None = None
) -> Tensor:
    """entropy = -sum p ln p. logits (..., V / tp) -> (...), in the logits' dtype."""
    return _entropy(vocab_parallel_logits, None, vocab_size, shard)


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor,
    chunk_size: int = 2048,
    *,
    vocab_size: int | None = None,
    shard: VocabShard | None = None,
) -> Tensor:
    """`vocab_parallel_entropy`, `chunk_size` rows at a time; the same bits, and still one all-gather."""
    return _entropy(vocab_parallel_logits, chunk_size, vocab_size, shard)


def vocab_parallel_log_probs_from_logits(
    logits: Tensor, labels: Tensor, *, vocab_size: int | None = None, shard: VocabShard | None = None
) -> Tensor:
    """ln softmax(logits)[label]. logits (..., V / tp), labels (...) global ids -> (...) fp32 (fp64 for fp64 logits)."""
    shard = shard or _place(logits, vocab_size)
    log_prob = token_stats(logits, labels, stats=("log_prob",), shard=shard).log_prob
    assert log_prob is not None
    return log_prob


def vocab_parallel_sum_pi_squared(
    vocab_parallel_logits: Tensor, *, vocab_size: int | None = None, shard: VocabShard | None = None
) -> Tensor:
    """sum p^2. logits (..., V / tp) -> (...) fp32 (fp64 for fp64 logits)."""
    shard = shard or _shard_without_labels(vocab_parallel_logits, vocab_size)
    value = token_stats(vocab_parallel_logits, None, stats=("sum_pi_squared",), shard=shard).sum_pi_squared
    assert value is not None
    return value


def _entropy(logits: Tensor, chunk_size: int | None, vocab_size: int | None, shard: VocabShard | None) -> Tensor:
    shard = shard or _shard_without_labels(logits, vocab_size)
    entropy = token_stats(logits, None, stats=("entropy",), shard=shard, chunk_size=chunk_size).entropy
    assert entropy is not None
    return entropy.to(logits.dtype)


def _group() -> dist.ProcessGroup:
    """Megatron's tensor-parallel group. Errors: ModuleNotFoundError without Megatron-Core, ValueError before its groups
    are made."""
    from flathead.engines._cpu import import_megatron

    import_megatron("megatron.core.parallel_state")
    from megatron.core import parallel_state

    mpu: Any = parallel_state  # which types groups as `ProcessGroup | int`
    try:
        return mpu.get_tensor_model_parallel_group()
    except AssertionError as error:
        raise ValueError(
            "flathead.megatron: expected Megatron's process groups, got none; call "
            "megatron.core.parallel_state.initialize_model_parallel first, or flathead.token_stats with a VocabShard"
        ) from error


def _shard_without_labels(logits: Tensor, vocab_size: int | None) -> VocabShard | None:
    """Without labels and padding it does not matter which columns these are, nor how many the others have."""
    if vocab_size is not None:
        return _place(logits, vocab_size)
    group, width = _group(), _width(logits)
    return None if dist.get_world_size(group) == 1 else VocabShard(0, width, _NO_BOUND, group)


def _place(logits: Tensor, vocab_size: int | None) -> VocabShard:
    """Where this rank's columns are, from the widths of all."""
    group, width = _group(), _width(logits)
    widths = [torch.zeros(1, dtype=torch.int64, device=logits.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(widths, torch.tensor([width], device=logits.device), group=group)
    ends = list(accumulate(int(other) for other in widths))
    if vocab_size is not None and vocab_size > ends[-1]:
        raise ValueError(f"vocab_size: expected at most the {ends[-1]} columns of all shards, got {vocab_size}")
    stop = ends[dist.get_rank(group)]
    return VocabShard(stop - width, stop, ends[-1] if vocab_size is None else vocab_size, group)


def _width(logits: Tensor) -> int:
    if not isinstance(logits, Tensor) or logits.ndim < 1:
        raise ValueError(f"logits: expected a tensor (..., V / tp), got {getattr(logits, 'shape', type(logits))}")
    return logits.shape[-1]
