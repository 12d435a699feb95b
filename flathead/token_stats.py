"""Log-probability, entropy, sum of squared probabilities and logsumexp of every token, from logits or hidden states.

Two autograd functions over whole tensors, with the chunk loop inside. Forward: every chunk is read once and reduced
to five numbers a row (`vocab_math.partials`); with the vocabulary sharded over tensor-parallel ranks, one all-gather of
those makes whole rows. Backward: the probabilities are recomputed from the saved inputs and four numbers a row, and the
gradient is written once. Nothing of size N x V is ever kept, and from hidden states none is ever made.

The idea of recomputing instead of keeping the logits is that of cut cross-entropy (Wijmans et al., arXiv:2411.09009).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flathead.arguments import (
    Options,
    check_floating,
    check_head,
    check_label_range,
    check_labels,
    check_main_grad,
    check_mask,
    check_not_inference,
    check_options,
    check_shard,
    require,
    scaling_of,
)
from flathead.head_stats import HeadStats
from flathead.logits_stats import LogitsStats
from flathead.overwriting import check_apart, check_overwritable
from flathead.vocab_shard import VocabShard, is_dtensor, local_rows, local_weight, shard_of_dtensor


@dataclass(frozen=True)
class TokenStats:
    """Per-token statistics, each of the labels' shape in fp32 (fp64 for fp64 input); None if not asked for.

    log_prob = ln p[label]    entropy = -sum p ln p    sum_pi_squared = sum p^2    logsumexp = ln sum e^x
    """

    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    logsumexp: Tensor | None = None


def token_stats(
    logits: Tensor,
    labels: Tensor | None,
    *,
    temperature: float | Tensor = 1.0,
    stats: tuple[str, ...] = ("log_prob", "entropy"),
    shard: VocabShard | None = None,
    vocab_size: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    inplace_backward: bool = False,
    impl: str = "auto",
) -> TokenStats:
    """Statistics of `softmax(softcap(logits * logit_scale) / temperature)` per row, with exact gradients.

    Shapes: logits (..., V_local) floating, any strides; labels (...) int64, global ids (None without log_prob);
    temperature a number, or a tensor that broadcasts to (...). Layout: logits S(-1)@TP -> statistics replicated@TP.

    shard: the columns this rank holds; None: this tensor is the whole vocabulary. A DTensor brings its own.
    vocab_size: the true size when the last columns are padding. ignore_index: rows with this label give 0, no gradient.
    chunk_size: rows at a time; None: from `memory_budget` (bytes of workspace; None: 32 MiB on a CPU).
    inplace_backward: the gradient overwrites the logits; they, and this graph, can then not be used again.

    Costs: one all-gather of 20 bytes a row in forward, no collective in backward; extra memory is the gradient (nothing
    with inplace_backward) and the workspace. Errors: ValueError for any bad argument, before any work.
    """
    options = check_options(
        Options(stats, softcap, logit_scale, ignore_index, chunk_size, memory_budget, inplace_backward, impl)
    )
    check_floating("logits", logits)
    if is_dtensor(logits):
        shard = _agreed(shard, shard_of_dtensor("logits", logits, -1, vocab_size))
        labels, temperature = _local_rows_of((labels, temperature), logits, -1)
        logits = logits.to_local()  # type: ignore[attr-defined]  # a DTensor, whose type is imported only where needed
    shard = check_shard(shard, logits.shape[-1], vocab_size, "logits")
    check_labels(labels, logits.shape[:-1], logits, options)
    check_overwritable(logits, inplace_backward)
    check_not_inference(torch.is_grad_enabled() and logits.requires_grad, labels=labels)
    scaling = scaling_of(temperature, logits.shape[:-1], logits, options)
    ignored = check_label_range(labels, None, shard.vocab_size, ignore_index)
    values = LogitsStats.apply(logits, labels, ignored, scaling, shard, options)
    return TokenStats(**dict(zip(options.stats, values, strict=True)))


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    main_grad: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    stats: tuple[str, ...] = ("log_prob", "entropy"),
    shard: VocabShard | None = None,
    vocab_size: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    inplace_backward: bool = False,
    impl: str = "auto",
) -> TokenStats:
    """`token_stats(hidden @ weight.T + bias, labels, ...)` without the logits ever existing.

    Shapes: hidden (..., H); weight (V_local, H); bias (V_local); labels and mask (...). Rows with mask False or label
    ignore_index are dropped before the first matrix product: they give 0, no gradient, and cost nothing.
    Layout: hidden replicated@TP, weight S(0)@TP -> statistics replicated@TP; hidden's gradient is summed over TP once.
    A DTensor weight brings its own shard; sequence-parallel DTensor hidden states are gathered.

    The product is made in tiles (tokens x columns) within `memory_budget` bytes, of `chunk_size` tokens if given.
    Tiles are computed in hidden's dtype, or in autocast's: fp32 master weights are then cast tile by tile and keep an
    fp32 gradient; fp16 is computed in fp32, since its range ends at 65504. Gradients are accumulated in fp32: hidden's
    in N x H x 4 bytes, weight's tile by tile.
    inplace_backward: hidden's gradient overwrites hidden; it, and this graph, can then not be used again.
    main_grad (V_local, H): takes weight's gradient on top of what it holds, in its dtype; `weight.grad` then gets none.

    Costs: four products of N x H x V; one all-gather of 20 bytes a row in forward, one all-reduce of the hidden
    gradient in backward. Errors: ValueError for any bad argument, before any work.
    """
    options = check_options(
        Options(stats, softcap, logit_scale, ignore_index, chunk_size, memory_budget, inplace_backward, impl)
    )
    check_floating("hidden", hidden)
    check_floating("weight", weight)
    if is_dtensor(weight):
        shard = _agreed(shard, shard_of_dtensor("weight", weight, 0, vocab_size))
        require(main_grad is None, "main_grad", "None with a DTensor weight", "a tensor")
    rows = _local_rows_of((hidden, labels, mask, temperature), weight, 0)
    weight, bias = local_weight(weight, hidden), bias if bias is None else local_weight(bias, hidden)
    hidden, labels, mask, temperature = rows
    compute_dtype = _check_tensors(hidden, weight, bias, labels, main_grad, inplace_backward)
    shard = check_shard(shard, weight.shape[0], vocab_size, "weight")
    lead = hidden.shape[:-1]
    check_labels(labels, lead, hidden, options)
    check_mask(mask, lead, hidden)
    scaling = scaling_of(temperature, lead, hidden, options)
    ignored = check_label_range(labels, mask, shard.vocab_size, ignore_index)
    dropped = ignored if mask is None else (~mask if ignored is None else ignored | ~mask)
    live = None if dropped is None or not bool(dropped.any()) else ~dropped
    with torch.autocast(hidden.device.type, enabled=False):  # the tiles' dtypes are decided here, not by autocast
        values = HeadStats.apply(hidden, weight, bias, labels, live, scaling, shard, options, compute_dtype, main_grad)
    return TokenStats(**dict(zip(options.stats, values, strict=True)))


def _check_tensors(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor | None,
    main_grad: Tensor | None,
    inplace_backward: bool,
) -> torch.dtype:
    """Shapes, dtypes, and what backward writes to or keeps. Returns the dtype the product is computed in."""
    compute_dtype = check_head(hidden, weight, bias)
    check_main_grad(main_grad, weight)
    check_apart("main_grad", main_grad, hidden=hidden, weight=weight, bias=bias)
    check_overwritable(hidden, inplace_backward, weight=weight, bias=bias)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    check_not_inference(wanted, hidden=hidden, weight=weight, bias=bias, labels=labels)
    return compute_dtype


def _agreed(given: VocabShard | None, found: VocabShard) -> VocabShard:
    require(given is None or given == found, "shard", f"None, or {found} as the DTensor says", given)
    return found


def _local_rows_of(per_row: tuple, vocabulary: Tensor, vocab_dim: int) -> tuple:
    return tuple(local_rows(value, vocabulary, vocab_dim) if is_dtensor(value) else value for value in per_row)
