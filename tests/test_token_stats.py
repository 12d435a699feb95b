"""token_stats from logits: values and gradients against float64, exactness, and what it may not touch."""

# A statistic that was asked for is never None, which the annotation cannot say.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flathead
from tests.support.cases import DTYPES, Case, cases
from tests.support.truth import STATS, assert_as_good, compute_dtype, gradients, reference


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def run(case: Case, **changes: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The library's values, and its gradient of the logits under the case's upstream gradients."""
    leaf = case.logits.detach().requires_grad_()
    options = {**case.options, "chunk_size": case.chunk_size, **changes}
    stats = flathead.token_stats(leaf, case.labels, stats=case.stats, **options)
    values = {name: getattr(stats, name) for name in case.stats}
    (grad,) = gradients(values, case.upstream, [leaf])
    return {name: value.detach() for name, value in values.items()}, grad


def assert_same_bits(first: tuple[dict[str, Tensor], Tensor], second: tuple[dict[str, Tensor], Tensor]) -> None:
    for name, value in first[0].items():
        assert torch.equal(bits(value), bits(second[0][name])), name
    assert torch.equal(bits(first[1]), bits(second[1])), "gradient"


@given(cases())
def test_value_and_gradient_are_as_good_as_naive(case: Case) -> None:
    values, grad = run(case)
    truth = reference(case.logits, case.labels, case.upstream, dtype=torch.float64, **case.options)
    naive = reference(case.logits, case.labels, case.upstream, dtype=compute_dtype(case.logits.dtype), **case.options)
    for name in case.stats:
        assert values[name].dtype == compute_dtype(case.logits.dtype)
        assert_as_good(values[name], truth[0][name], naive[0][name], name)
    assert grad.dtype == case.logits.dtype
    real = case.options["vocab_size"] or case.logits.shape[-1]
    assert_as_good(grad[..., :real], truth[1][..., :real], naive[1][..., :real], "gradient")
    assert not grad[..., real:].any(), "padding columns get exactly zero"
    assert not grad[case.labels == -100].any(), "ignored rows get exactly zero"


@given(cases())
def test_bounds_hold_exactly(case: Case) -> None:
    stats = flathead.token_stats(case.logits, case.labels, stats=STATS, chunk_size=case.chunk_size, **case.options)
    kept = case.labels != -100
    real = case.options["vocab_size"] or case.logits.shape[-1]
    ulp = 4 * torch.finfo(compute_dtype(case.logits.dtype)).eps
    assert (stats.log_prob <= 0).all()
    assert (stats.entropy >= 0).all()
    assert (stats.entropy <= math.log(real) * (1 + ulp)).all()
    assert (stats.sum_pi_squared[kept] >= (1 - ulp) / real).all()
    assert (stats.sum_pi_squared <= 1).all()
    for name in STATS:
        assert not getattr(stats, name)[~kept].any(), name


@given(cases())
def test_inputs_keep_their_bits_and_versions(case: Case) -> None:
    temperature = case.options["temperature"]
    tensors = [case.logits, case.labels] + ([temperature] if isinstance(temperature, Tensor) else [])
    before = [(bits(tensor).clone(), tensor._version) for tensor in tensors]
    run(case)
    for tensor, (old, version) in zip(tensors, before, strict=True):
        assert torch.equal(bits(tensor), old)
        assert tensor._version == version


@given(cases())
def test_chunk_size_changes_no_bit(case: Case) -> None:
    whole = run(case, chunk_size=10_000)
    for chunk in ({"chunk_size": 1}, {"chunk_size": 3}, {"chunk_size": 8}, {"chunk_size": None}):
        assert_same_bits(run(case, **chunk), whole)
    assert_same_bits(run(case, chunk_size=None, memory_budget=4096), whole)


@given(cases())
def test_row_alone_equals_row_in_the_batch_bit_for_bit(case: Case) -> None:
    values, grad = run(case)
    rows = list(itertools.product(*map(range, case.labels.shape)))
    for row in rows[:: max(1, len(rows) // 4)]:
        temperature = case.options["temperature"]
        if isinstance(temperature, Tensor):
            temperature = temperature.expand(case.labels.shape)[row]
        alone = Case(
            case.logits[row].contiguous(),
            case.labels[row],
            {**case.options, "temperature": temperature},
            case.stats,
            {name: weight[row] for name, weight in case.upstream.items()},
            None,
        )
        assert_same_bits(run(alone), ({name: value[row] for name, value in values.items()}, grad[row]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_row_alone_equals_row_in_the_batch_with_several_threads(dtype: torch.dtype) -> None:
    """A vocabulary that torch shares out among threads: the way a row is summed must not depend on its neighbours."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 200_001, generator=generator).to(dtype)
    labels, ones = torch.tensor([0, 100_000, 200_000]), {name: torch.ones(3) for name in STATS}
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        values, grad = run(Case(logits, labels, {}, STATS, ones, 3))  # in one chunk
        for row in range(3):
            one = {name: torch.ones(()) for name in STATS}
            alone = run(Case(logits[row], labels[row], {}, STATS, one, None))
            assert_same_bits(alone, ({name: value[row] for name, value in values.items()}, grad[row]))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_49_tokens_in_chunks_of_8(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(49, 301, generator=generator)).to(dtype)
    labels = torch.randint(0, 301, (49,), generator=generator)
    upstream = {name: torch.randn(49, generator=generator) for name in STATS}
    case = Case(logits, labels, {}, STATS, upstream, 8)
    values, grad = run(case)
    truth = reference(logits, labels, upstream, dtype=torch.float64)
    naive = reference(logits, labels, upstream, dtype=compute_dtype(dtype))
    for name in STATS:
        assert_as_good(values[name], truth[0][name], naive[0][name], name)
    assert_as_good(grad, truth[1], naive[1], "gradient")


@pytest.mark.parametrize("stats", [order for k in (1, 2, 3) for order in itertools.permutations(STATS[:3], k)], ids=str)
@pytest.mark.parametrize("passes", [1, 2])
def test_every_order_and_combination_on_one_tensor(stats: tuple[str, ...], passes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 17, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 17, (5,), generator=generator)
    factor: dict[str, float] = dict(zip(STATS, (1.0, 0.1, -0.7, 0.0), strict=True))
    result = flathead.token_stats(logits, labels, stats=stats)
    assert [name for name in STATS if getattr(result, name) is not None] == [name for name in STATS if name in stats]
    terms = [factor[name] * getattr(result, name).sum() for name in stats]
    if passes == 1:
        torch.stack(terms).sum().backward()
    else:  # one backward pass a term, then the first once more: gradients add up
        for term in [*terms, terms[0]]:
            term.backward(retain_graph=True)
    upstream = {name: torch.full((5,), factor[name], dtype=torch.float64) for name in stats}
    if passes == 2:
        upstream[stats[0]] = 2 * upstream[stats[0]]
    _, expected = reference(logits, labels, upstream, dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STATS)
def test_row_weights_scale_rows_and_zero_is_exactly_zero(name: str, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(2)).to(dtype)
    labels = torch.tensor([4, 0, 10])

    def grad_under(weights: list[float]) -> Tensor:
        return run(Case(logits, labels, {}, (name,), {name: torch.tensor(weights)}, None))[1]

    ones, weighted = grad_under([1.0, 1.0, 1.0]), grad_under([2.0, 0.0, -1.0])
    assert ones[0].any() and ones[2].any()
    assert torch.equal(weighted[0], 2 * ones[0])
    assert not weighted[1].any()
    assert torch.equal(weighted[2], -ones[2])


@given(cases(dtypes=(torch.float32, torch.float64)), st.sampled_from([0.0, 1.0]))
def test_linearity_in_the_upstream_gradient(case: Case, keep_first: float) -> None:
    """The gradient under several upstream gradients is the sum of the gradients under each."""
    generator = torch.Generator().manual_seed(0)
    case.upstream = {name: keep_first + torch.rand(case.labels.shape, generator=generator) for name in case.stats}
    together = run(case)[1].double()
    apart = torch.zeros_like(together)
    for name in case.stats:
        case_of_one = Case(case.logits, case.labels, case.options, case.stats, {name: case.upstream[name]}, None)
        apart += run(case_of_one)[1].double()
    scale = max([1e-3, apart.abs().max().item() if apart.numel() else 0.0])
    assert (together - apart).abs().le(64 * torch.finfo(case.logits.dtype).eps * scale).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.25])
@pytest.mark.parametrize("offset", [1e8, -1e8])
def test_a_common_offset_changes_nothing(offset: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    # Multiples of 8, so that adding 1e8 in fp32 is exact.
    logits = 8.0 * torch.randint(-3, 4, (6, 37), generator=generator).float()
    labels = torch.randint(0, 37, (6,), generator=generator)
    stats = ("log_prob", "entropy", "sum_pi_squared")
    upstream = {name: torch.randn(6, generator=generator) for name in stats}
    plain = run(Case(logits, labels, {"temperature": temperature}, stats, upstream, None))
    shifted = run(Case(logits + offset, labels, {"temperature": temperature}, stats, upstream, None))
    for name in stats:
        torch.testing.assert_close(shifted[0][name], plain[0][name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shifted[1], plain[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_ignored_rows_may_hold_anything(poison: float) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(4))
    logits[1], logits[3] = poison, poison
    case = Case(logits, torch.tensor([2, -100, 8, -100]), {}, STATS, {name: torch.ones(4) for name in STATS}, None)
    values, grad = run(case)
    for name in STATS:
        assert not values[name][[1, 3]].any()
        assert values[name].isfinite().all()
    assert not grad[[1, 3]].any()
    assert grad.isfinite().all()


def test_another_ignore_index() -> None:
    logits = torch.randn(2, 5)
    stats = flathead.token_stats(logits, torch.tensor([3, -1]), ignore_index=-1)
    assert stats.log_prob[1] == 0 and stats.log_prob[0] < 0
    # Inside the vocabulary too: the padding token as the ignored label.
    assert flathead.token_stats(logits, torch.tensor([3, 0]), ignore_index=0).entropy[1] == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 1, 7])
def test_no_rows(shape: tuple[int, ...], chunk_size: int | None) -> None:
    logits = torch.randn(*shape, 5, requires_grad=True)
    labels = torch.zeros(shape, dtype=torch.int64)
    stats = flathead.token_stats(logits, labels, stats=STATS, chunk_size=chunk_size)
    for name in STATS:
        assert getattr(stats, name).shape == shape
    torch.stack([getattr(stats, name).sum() for name in STATS]).sum().backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape


def test_all_labels_ignored_is_zero_not_nan() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    stats = flathead.token_stats(logits, torch.full((3,), -100), stats=STATS)
    torch.stack([getattr(stats, name).sum() for name in STATS]).sum().backward()
    assert not any(getattr(stats, name).any() for name in STATS)
    assert logits.grad is not None and not logits.grad.any()


def test_labels_are_optional_without_log_prob() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(5)).requires_grad_()
    rest = STATS[1:]
    stats = flathead.token_stats(logits, None, stats=rest)
    labelled = flathead.token_stats(logits, torch.zeros(2, 3, dtype=torch.int64), stats=STATS)
    for name in rest:
        assert torch.equal(getattr(stats, name), getattr(labelled, name))
    assert stats.log_prob is None
    stats.entropy.sum().backward()
    assert logits.grad is not None and logits.grad.any()


def test_only_the_statistics_asked_for_come_back() -> None:
    logits, labels = torch.randn(3, 5), torch.tensor([0, 1, 2])
    default = flathead.token_stats(logits, labels)
    assert default.log_prob is not None and default.entropy is not None
    assert default.sum_pi_squared is None and default.logsumexp is None
    for name in STATS:
        only = flathead.token_stats(logits, labels, stats=(name,))
        assert [other for other in STATS if getattr(only, other) is not None] == [name]


@pytest.mark.parametrize("inplace", [False, True], ids=["new gradient", "in place"])
def test_rows_beyond_two_to_the_31_elements(inplace: bool) -> None:
    """Rows that far apart in one storage, of which only the rows themselves are ever touched, hence resident."""
    width, apart = 1000, 2**30 + 7
    logits = torch.empty(2 * apart + width, dtype=torch.float16).as_strided((3, width), (apart, 1))
    logits.copy_(torch.randn(3, width, generator=torch.Generator().manual_seed(6)))
    labels, upstream = torch.tensor([5, -100, 999]), {name: torch.tensor([1.0, 1.0, -2.0]) for name in STATS}
    true_values, true_grad = reference(logits, labels, upstream, dtype=torch.float64)
    naive_values, naive_grad = reference(logits, labels, upstream, dtype=torch.float32)
    values, grad = run(Case(logits, labels, {}, STATS, upstream, 2), inplace_backward=inplace)
    for name in STATS:
        assert_as_good(values[name], true_values[name], naive_values[name], name)
    assert_as_good(grad, true_grad, naive_grad, "gradient")
