"""What every rank does in test_vocab_parallel: the sharded result against the whole one in float64, and the traffic."""

# A statistic that was asked for is never None, which the annotation cannot say.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import flathead
from tests.support.truth import (
    STATS,
    assert_as_good,
    compute_dtype,
    gradients,
    linear_reference,
    reference,
)

N, H = 13, 6
CASES: dict[str, Callable[[int, int], None]] = {}


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    CASES[function.__name__] = function
    return function


def shards(widths: list[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(widths)]))


def layouts(world: int) -> dict[str, tuple[list[tuple[int, int]], int]]:
    """name -> ([start, stop) of every rank, true vocabulary size)"""
    even = shards([8] * world)
    return {
        "even": (even, 8 * world),
        "uneven": (shards([3 + 5 * (world - rank) for rank in range(world)]), 3 * world + 5 * world * (world + 1) // 2),
        "one column": (shards([1] * world), world),
        "padded": (even, 8 * world - 3),
        "last rank all padding": (even, 8 * (world - 1)),
        "all but the first rank padding": (even, 5),
        "last rank empty": (shards([8] * (world - 1) + [0]), 8 * (world - 1)),
        "first rank empty": (shards([0] + [8] * (world - 1)), 8 * (world - 1)),
    }


def data(seed: int, width: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same on every rank: logits (N, width), labels with ignored rows, upstream gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(N, width, generator=generator, dtype=torch.float64)
    logits[:, vocab_size:] = math.nan
    labels = torch.randint(0, vocab_size, (N,), generator=generator)
    labels[[2, 7]] = -100
    return logits.to(dtype), labels, {name: torch.randn(N, generator=generator) for name in STATS}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_on_every_rank(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    mine = tensor.detach().contiguous()
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, mine, group=group)
    assert all(torch.equal(mine.view(torch.uint8), other.view(torch.uint8)) for other in others)


def check_logits(
    logits: Tensor, labels: Tensor, upstream: dict[str, Tensor], shard: flathead.VocabShard, **options: Any
) -> None:
    """token_stats of this rank's columns against the whole: values, local gradient, bits of all ranks, traffic."""
    leaf = logits[:, shard.start : shard.stop].clone().requires_grad_()
    tiling = {"chunk_size": [None, 1, 5, 100][dist.get_rank(shard.group) % 4]}
    with CommDebugMode() as forward:
        stats = flathead.token_stats(leaf, labels, stats=STATS, shard=shard, **options, **tiling)
    assert forward.get_total_counts() == 1, forward.get_comm_counts()
    values = {name: getattr(stats, name) for name in STATS}
    with CommDebugMode() as backward:
        (grad,) = gradients(values, upstream, [leaf])
    assert backward.get_total_counts() == 0, backward.get_comm_counts()
    real = slice(None, shard.vocab_size)
    truth = reference(logits[:, real], labels, upstream, dtype=torch.float64, **options)
    naive = reference(logits[:, real], labels, upstream, dtype=compute_dtype(logits.dtype), **options)
    for name in STATS:
        assert_as_good(values[name].detach(), truth[0][name], naive[0][name], name)
        assert_same_on_every_rank(values[name], shard.group)
    mine = slice(shard.start, min(shard.stop, shard.vocab_size))
    live = max(0, mine.stop - mine.start)
    if live:
        assert_as_good(grad[:, :live], truth[1][:, mine], naive[1][:, mine], "gradient")
    assert not grad[:, live:].any()


@case
def every_layout_from_logits(rank: int, world: int) -> None:
    for seed, (bounds, vocab_size) in enumerate(layouts(world).values()):
        shard = flathead.VocabShard(*bounds[rank], vocab_size, dist.group.WORLD)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            logits, labels, upstream = data(seed, bounds[-1][1], vocab_size, dtype)
            check_logits(logits, labels, upstream, shard)
            per_token = 0.3 + torch.rand(N, generator=torch.Generator().manual_seed(seed))
            check_logits(logits, labels, upstream, shard, temperature=per_token, softcap=8.0, logit_scale=0.5)
            check_logits(logits, labels, upstream, shard, temperature=0.7)


@case
def every_layout_from_hidden(rank: int, world: int) -> None:
    for seed, (bounds, vocab_size) in enumerate(layouts(world).values()):
        shard = flathead.VocabShard(*bounds[rank], vocab_size, dist.group.WORLD)
        for dtype in (torch.float64, torch.bfloat16):
            check_hidden(seed, bounds[-1][1], shard, dtype)
        check_hidden(seed, bounds[-1][1], shard, torch.float64, softcap=5.0, temperature=0.5)


def head_data(seed: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(width, H, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), torch.randn(width, generator=generator, dtype=torch.float64).to(dtype)


def check_hidden(seed: int, width: int, shard: flathead.VocabShard, dtype: torch.dtype, **options: Any) -> None:
    """linear_token_stats of this rank's rows of the head: hidden's gradient whole, the weight's and bias's local."""
    hidden, weight, bias = head_data(seed, width, dtype)
    _, labels, upstream = data(seed, width, shard.vocab_size, dtype)
    mask = torch.arange(N) % 4 != 1
    mine = slice(shard.start, shard.stop)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight[mine], bias[mine])]
    tiling = {
        "chunk_size": [None, 1, 5][dist.get_rank(shard.group) % 3],
        "memory_budget": [None, 3000][shard.start % 2],
    }
    with CommDebugMode() as forward:
        stats = flathead.linear_token_stats(
            leaves[0], leaves[1], labels, bias=leaves[2], mask=mask, stats=STATS, shard=shard, **options, **tiling
        )
    assert forward.get_total_counts() == 1, forward.get_comm_counts()
    values = {name: getattr(stats, name) for name in STATS}
    with CommDebugMode() as backward:
        grads = gradients(values, upstream, leaves)
    assert backward.get_total_counts() == 1, backward.get_comm_counts()
    real = slice(None, shard.vocab_size)
    unsharded = (hidden, weight[real], bias[real], labels, upstream)
    truth = linear_reference(*unsharded, exact=True, mask=mask, **options)
    naive = linear_reference(*unsharded, exact=False, mask=mask, **options)
    eps = 2 * torch.finfo(dtype).eps / torch.finfo(compute_dtype(dtype)).eps if dtype == torch.bfloat16 else 16.0
    for name in STATS:
        assert_as_good(values[name].detach(), truth[0][name], naive[0][name], name, ulps=eps)
        assert_same_on_every_rank(values[name], shard.group)
    assert_as_good(grads[0], truth[1][0], naive[1][0], "gradient of hidden", ulps=eps)
    assert_same_on_every_rank(grads[0], shard.group)
    live = max(0, min(shard.stop, shard.vocab_size) - shard.start)
    for what, grad, true, plain in zip(("weight", "bias"), grads[1:], truth[1][1:], naive[1][1:], strict=True):
        assert not grad[live:].any()
        if live:
            columns = slice(shard.start, shard.start + live)
            assert_as_good(grad[:live], true[columns], plain[columns], f"gradient of {what}", ulps=eps)


@case
def a_whole_shard_of_minus_infinity(rank: int, world: int) -> None:
    for dead in range(world):
        logits, labels, upstream = data(dead, 8 * world, 8 * world, torch.float64)
        logits[:, 8 * dead : 8 * dead + 8] = -math.inf
        labels = torch.where((labels >= 0) & (labels // 8 == dead), (labels + 8) % (8 * world), labels)
        shard = flathead.VocabShard(8 * rank, 8 * rank + 8, 8 * world, dist.group.WORLD)
        check_logits(logits, labels, upstream, shard)
        check_logits(logits.float(), labels, upstream, shard)
    # One live column in the whole vocabulary, on the last rank; the label there.
    logits = torch.full((N, 8 * world), -math.inf)
    logits[:, -1] = -3.0
    shard = flathead.VocabShard(8 * rank, 8 * rank + 8, 8 * world, dist.group.WORLD)
    leaf = logits[:, 8 * rank : 8 * rank + 8].clone().requires_grad_()
    stats = flathead.token_stats(leaf, torch.full((N,), 8 * world - 1), stats=STATS, shard=shard)
    assert not stats.log_prob.any() and not stats.entropy.any()
    assert stats.sum_pi_squared.eq(1).all() and stats.logsumexp.eq(-3).all()
    (stats.log_prob + stats.entropy + stats.sum_pi_squared).sum().backward()
    assert leaf.grad is not None and not leaf.grad.any()


@case
def shards_from_group(rank: int, world: int) -> None:
    shard = flathead.VocabShard.from_group(dist.group.WORLD, 8, 8 * world - 3)
    assert (shard.start, shard.stop, shard.vocab_size) == (8 * rank, 8 * rank + 8, 8 * world - 3)
    logits, labels, upstream = data(0, 8 * world, 8 * world - 3, torch.float64)
    check_logits(logits, labels, upstream, shard)
    assert flathead.VocabShard.from_group(dist.group.WORLD, 8, 8 * world).vocab_size == 8 * world


@case
def one_collective_whatever_the_chunks_and_none_to_spare(rank: int, world: int) -> None:
    """One all-gather of 20 bytes a row; without gradients the same; a frozen hidden state needs no all-reduce."""
    shard = flathead.VocabShard(8 * rank, 8 * rank + 8, 8 * world, dist.group.WORLD)
    logits, labels, _ = data(0, 8 * world, 8 * world, torch.float32)
    mine = logits[:, shard.start : shard.stop].clone()
    for chunk_size in (1, 4, 1000):
        for stats in (("log_prob",), STATS):
            with CommDebugMode() as traffic, torch.no_grad():
                flathead.token_stats(mine, labels, stats=stats, shard=shard, chunk_size=chunk_size)
            counts = {str(operation): count for operation, count in traffic.get_comm_counts().items() if count}
            assert len(counts) == 1 and sum(counts.values()) == 1, counts
            assert "gather" in next(iter(counts)), counts
    hidden, weight, _ = head_data(0, 8 * world, torch.float32)
    weight = weight[shard.start : shard.stop].clone().requires_grad_()
    log_prob = flathead.linear_token_stats(hidden, weight, labels, shard=shard, chunk_size=2).log_prob
    with CommDebugMode() as traffic:
        log_prob.sum().backward()
    assert traffic.get_total_counts() == 0
    log_prob = flathead.linear_token_stats(hidden.requires_grad_(), weight, labels, shard=shard, chunk_size=2).log_prob
    with CommDebugMode() as traffic:
        log_prob.sum().backward()
    counts = {str(operation): count for operation, count in traffic.get_comm_counts().items() if count}
    assert len(counts) == 1 and sum(counts.values()) == 1 and "reduce" in next(iter(counts)), counts


@case
def no_rows_and_no_live_rows(rank: int, world: int) -> None:
    shard = flathead.VocabShard(8 * rank, 8 * rank + 8, 8 * world, dist.group.WORLD)
    for rows, label in ((0, 0), (3, -100)):
        logits = torch.randn(rows, 8, requires_grad=True)
        labels = torch.full((rows,), label)
        flathead.token_stats(logits, labels, shard=shard).log_prob.sum().backward()
        hidden, weight = torch.randn(rows, H, requires_grad=True), torch.randn(8, H, requires_grad=True)
        flathead.linear_token_stats(hidden, weight, labels, shard=shard).entropy.sum().backward()
        for leaf in (logits, hidden, weight):
            assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@case
def inplace_backward(rank: int, world: int) -> None:
    shard = flathead.VocabShard(8 * rank, 8 * rank + 8, 8 * world - 2, dist.group.WORLD)
    logits, labels, upstream = data(0, 8 * world, 8 * world - 2, torch.float32)
    grads = []
    for inplace in (False, True):
        leaf = logits[:, shard.start : shard.stop].clone().requires_grad_()
        own = leaf * 1.0
        stats = flathead.token_stats(own, labels, stats=STATS, shard=shard, inplace_backward=inplace)
        grads += gradients({name: getattr(stats, name) for name in STATS}, upstream, [own])
        assert (grads[-1].data_ptr() == own.data_ptr()) is inplace
    assert torch.equal(*grads)


@case
def bad_labels_are_refused_on_every_rank_before_any_collective(rank: int, world: int) -> None:
    shard = flathead.VocabShard(8 * rank, 8 * rank + 8, 8 * world - 3, dist.group.WORLD)
    logits, labels, _ = data(0, 8 * world, 8 * world - 3, torch.float32)
    labels[4] = 8 * world - 2  # inside the last rank's padding
    with CommDebugMode() as traffic:
        try:
            flathead.token_stats(logits[:, shard.start : shard.stop], labels, shard=shard)
        except ValueError as error:
            assert "labels" in str(error) and str(8 * world - 2) in str(error)
        else:
            raise AssertionError("a label in the padding was accepted")
    assert traffic.get_total_counts() == 0


@case
def a_group_that_is_not_the_default_one(rank: int, world: int) -> None:
    """Two groups at once (world 4), a part of the ranks (3), the same ranks (2)."""
    members = {2: [[0, 1]], 3: [[1, 2]], 4: [[0, 1], [2, 3]]}[world]
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            place = ranks.index(rank)
            shard = flathead.VocabShard(8 * place, 8 * place + 8, 15, group)
            logits, labels, upstream = data(ranks[0], 16, 15, torch.float64)  # other numbers in the other group
            check_logits(logits, labels, upstream, shard)
            check_hidden(ranks[0], 16, shard, torch.float64)
            assert flathead.VocabShard.from_group(group, 8, 15) == shard


@case
def dtensor_logits(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for width, vocab_size in ((8 * world, None), (8 * world + 1, None), (world + 1, None), (8 * world, 8 * world - 3)):
        logits, labels, upstream = data(width, width, vocab_size or width, torch.float64)
        leaf = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        stats = flathead.token_stats(leaf, labels, stats=STATS, vocab_size=vocab_size, chunk_size=rank + 1)
        values = {name: getattr(stats, name) for name in STATS}
        (grad,) = gradients(values, upstream, [leaf])
        assert isinstance(grad, DTensor) and grad.placements == (Shard(1),)
        true_values, true_grad = reference(logits[:, :vocab_size], labels, upstream, dtype=torch.float64)
        for name in STATS:
            assert not isinstance(values[name], DTensor)
            torch.testing.assert_close(values[name].detach(), true_values[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole(grad)[:, :vocab_size], true_grad, rtol=1e-11, atol=1e-12)
        assert not whole(grad)[:, vocab_size or width :].any()


@case
def dtensor_weight(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for width in (8 * world, 8 * world + 1, world + 1):
        hidden, weight, bias = head_data(width, width, torch.float64)
        _, labels, upstream = data(width, width, width, torch.float64)
        truth, true_grads = linear_reference(hidden, weight, bias, labels, upstream, exact=True)
        for placement in (None, Replicate(), Shard(0)):  # hidden plain, replicated, sequence parallel
            hidden_leaf = hidden.clone() if placement is None else distribute_tensor(hidden, mesh, [placement])
            leaves = [hidden_leaf, *(distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (weight, bias))]
            leaves = [leaf.requires_grad_() for leaf in leaves]
            stats = flathead.linear_token_stats(leaves[0], leaves[1], labels, bias=leaves[2], stats=STATS)
            values = {name: getattr(stats, name) for name in STATS}
            grads = gradients(values, upstream, leaves)
            for name in STATS:
                torch.testing.assert_close(values[name].detach(), truth[name], rtol=1e-12, atol=1e-12)
            for grad, true in zip(grads, true_grads, strict=True):
                torch.testing.assert_close(whole(grad), true, rtol=1e-11, atol=1e-12)


@case
def dtensors_on_two_mesh_dimensions(rank: int, world: int) -> None:
    """dp2 x tp2: rows over one dimension, vocabulary over the other."""
    if world != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    half = slice(0, 7) if mesh.get_local_rank("dp") == 0 else slice(7, N)  # as Shard(0) cuts 13 rows
    logits, labels, upstream = data(0, 17, 17, torch.float64)
    truth, true_grad = reference(logits, labels, upstream, dtype=torch.float64)
    leaf = distribute_tensor(logits, mesh, [Shard(0), Shard(1)]).requires_grad_()
    mine = {name: weight[half] for name, weight in upstream.items()}
    for row_labels in (labels[half], distribute_tensor(labels, mesh, [Shard(0), Replicate()])):
        stats = flathead.token_stats(leaf, row_labels, stats=STATS)
        values = {name: getattr(stats, name) for name in STATS}
        (grad,) = gradients(values, mine, [leaf])
        for name in STATS:
            torch.testing.assert_close(values[name].detach(), truth[name][half], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole(grad), true_grad, rtol=1e-11, atol=1e-12)
    hidden, weight, _ = head_data(0, 17, torch.float64)
    truth, true_grads = linear_reference(hidden, weight, None, labels, upstream, exact=True)
    leaves = [
        distribute_tensor(hidden, mesh, [Shard(0), Replicate()]).requires_grad_(),
        distribute_tensor(weight, mesh, [Replicate(), Shard(0)]).requires_grad_(),
    ]
    row_labels = distribute_tensor(labels, mesh, [Shard(0), Replicate()])
    stats = flathead.linear_token_stats(leaves[0], leaves[1], row_labels, stats=STATS)
    values = {name: getattr(stats, name) for name in STATS}
    grads = gradients(values, mine, leaves)
    for name in STATS:
        torch.testing.assert_close(values[name].detach(), truth[name][half], rtol=1e-12, atol=1e-12)
    for grad, true in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(whole(grad), true, rtol=1e-11, atol=1e-12)
