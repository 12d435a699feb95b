"""What every rank does in test_megatron_names: Megatron's own groups, the drop-in names, whole logits in float64."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from flathead import VocabShard, megatron
from tests.distributed.vocab_parallel_cases import shards
from tests.support.megatron import tensor_parallel_group
from tests.support.truth import statistics

V = 24
NAMES: dict[str, Callable[..., Tensor]] = {
    "entropy": lambda logits, labels, **given: megatron.vocab_parallel_entropy(logits, **given),
    "entropy, chunks": lambda logits, labels, **given: megatron.vocab_parallel_entropy_with_chunking(
        logits, 3, **given
    ),
    "log_prob": lambda logits, labels, **given: megatron.vocab_parallel_log_probs_from_logits(logits, labels, **given),
    "sum_pi_squared": lambda logits, labels, **given: megatron.vocab_parallel_sum_pi_squared(logits, **given),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def data(lead: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The same on every rank of the group: logits (..., V), labels, an upstream gradient; others elsewhere."""
    generator = torch.Generator().manual_seed(dist.get_process_group_ranks(group)[0])
    logits = (4 * torch.randn(*lead, V, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, V - 3, lead, generator=generator)
    return logits, labels, torch.randn(lead, generator=generator)


def check(
    size: int, widths: list[int], lead: tuple[int, ...], dtype: torch.dtype, vocab_size: int | None = None
) -> None:
    group = tensor_parallel_group(size)
    whole, labels, upstream = data(lead, dtype, group)
    start, stop = shards(widths)[dist.get_rank(group)]
    truth_of = whole.double().requires_grad_()
    truth = statistics(truth_of, labels, dtype=torch.float64, vocab_size=vocab_size)
    local = whole[..., start:stop].clone().requires_grad_()
    version, given = local._version, {} if vocab_size is None else {"vocab_size": vocab_size}
    for name in (*NAMES, *reversed(NAMES)):  # any order, again and again, on the same logits
        value = NAMES[name](local, labels, **given)
        expected = truth[name.partition(",")[0]]
        assert value.shape == lead and value.device == local.device
        assert value.dtype == (dtype if name.startswith("entropy") else torch.promote_types(dtype, torch.float32))
        torch.testing.assert_close(value.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for _ in range(2):
            (grad,) = torch.autograd.grad(value, local, upstream.to(value.dtype), retain_graph=True)
            (true,) = torch.autograd.grad(expected, truth_of, upstream.to(value.dtype).double(), retain_graph=True)
            torch.testing.assert_close(
                grad.double(), true[..., start:stop], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
    assert local._version == version and torch.equal(local, whole[..., start:stop])


def one_all_gather_whatever_the_chunks(rank: int, world: int) -> None:
    group = tensor_parallel_group(world)
    whole, labels, _ = data((5, 4), torch.float32, group)
    start, stop = shards([V // world] * world)[dist.get_rank(group)]
    shard = VocabShard(start, stop, V, group)
    for name, call in NAMES.items():
        for given, labelled in (({}, 1 + (name == "log_prob")), ({"shard": shard}, 1)):
            local = whole[..., start:stop].clone().requires_grad_()
            with CommDebugMode() as forward:
                value = call(local, labels, **given)
            with CommDebugMode() as backward:
                value.sum().backward()
            assert forward.get_total_counts() == labelled, (name, forward.get_comm_counts())
            assert backward.get_total_counts() == 0, name


def chunks_of_any_size_give_the_same_bits(rank: int, world: int) -> None:
    group = tensor_parallel_group(world)
    whole, _, _ = data((7, 3), torch.bfloat16, group)
    start, stop = shards([V // world] * world)[dist.get_rank(group)]
    results = []
    for chunk_size in (1, 2, 5, 21, 2048):
        local = whole[..., start:stop].clone().requires_grad_()
        value = megatron.vocab_parallel_entropy_with_chunking(local, chunk_size=chunk_size)
        value.float().sum().backward()
        results.append((value, local.grad))
    assert all(torch.equal(v, results[0][0]) and torch.equal(g, results[0][1]) for v, g in results)


def cases(world: int) -> dict[str, Callable[[int, int], None]]:
    found: dict[str, Callable[..., None]] = {}
    for size in sorted({1, 2, world}):
        even = [V // size] * size
        for lead in ((), (11,), (3, 4), (2, 1, 3), (0,)):
            found[f"tp{size} {lead}"] = partial(check, size, even, lead, torch.float32)
        for dtype in (torch.bfloat16, torch.float64):
            found[f"tp{size} {dtype}"] = partial(check, size, even, (3, 4), dtype)
        found[f"tp{size} padded"] = partial(check, size, even, (3, 4), torch.float32, V - 3)
        if size > 1:
            uneven = [V - 3 * (size - 1), *[3] * (size - 1)]
            found[f"tp{size} uneven"] = partial(check, size, uneven, (3, 4), torch.float32)
            found[f"tp{size} uneven, padded"] = partial(check, size, uneven, (7,), torch.float32, V - 3)
            found[f"tp{size} empty shard"] = partial(check, size, [V, *[0] * (size - 1)], (7,), torch.float32)
    plain = {name: (lambda rank, world, call=call: call()) for name, call in found.items()}
    return plain | {f.__name__: f for f in (one_all_gather_whatever_the_chunks, chunks_of_any_size_give_the_same_bits)}


TWO, FOUR = cases(2), cases(4)
