"""linear_token_stats: equal to F.linear followed by the statistics, without the logits."""

# A statistic that was asked for is never None, which the annotation cannot say.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flathead
from tests.support.cases import leading_shapes, temperatures
from tests.support.counting import gemm_flops, saved_bytes_beyond, saved_tensors
from tests.support.truth import STATS, assert_as_good, compute_dtype, gradients, linear_reference


def tensors(
    seed: int, shape: tuple[int, ...], hidden_size: int, vocab: int, dtype: torch.dtype, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, hidden_size, generator=generator).to(dtype)
    weight = (2 * torch.randn(vocab, hidden_size, generator=generator) / hidden_size**0.5).to(dtype)
    bias_V = torch.randn(vocab, generator=generator).to(dtype) if bias else None
    return hidden, weight, bias_V, torch.randint(0, vocab, shape, generator=generator)


def run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    upstream: dict[str, Tensor],
    stats: tuple[str, ...] = STATS,
    **options: Any,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The library's values, and its gradients of hidden, weight (and bias)."""
    leaves = [tensor.detach().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    bias_leaf = leaves[2] if bias is not None else None
    result = flathead.linear_token_stats(leaves[0], leaves[1], labels, bias=bias_leaf, stats=stats, **options)
    values = {name: getattr(result, name) for name in stats}
    grads = gradients(values, upstream, leaves)
    return {name: value.detach() for name, value in values.items()}, grads


@given(st.data())
def test_value_and_gradients_are_as_good_as_naive(data: st.DataObject) -> None:
    draw = data.draw
    shape, dtype = draw(leading_shapes()), draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    vocab, hidden_size = draw(st.sampled_from([1, 2, 17, 64, 131])), draw(st.sampled_from([1, 8, 24]))
    seed = draw(st.integers(0, 2**32 - 1))
    hidden, weight, bias, labels = tensors(seed, shape, hidden_size, vocab, dtype, draw(st.booleans()))
    generator = torch.Generator().manual_seed(seed + 1)
    vocab_size = draw(st.sampled_from([None, max(1, vocab - 3)]))
    labels = labels.clamp(max=(vocab_size or vocab) - 1)
    labels = labels.masked_fill(torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0])), -100)
    mask = draw(st.sampled_from([None, torch.rand(shape, generator=generator) < 0.6]))
    stats = tuple(draw(st.permutations(STATS))[: draw(st.integers(1, 4))])
    used = draw(st.lists(st.sampled_from(stats), unique=True, min_size=1))
    upstream = {name: torch.randn(shape, generator=generator) for name in used}
    options: dict[str, Any] = {
        "temperature": draw(temperatures(shape, generator)),
        "vocab_size": vocab_size,
        "softcap": draw(st.sampled_from([None, None, 5.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.125])),
        "mask": mask,
    }
    tiling = {
        "chunk_size": draw(st.sampled_from([None, 1, 3, 1000])),
        "memory_budget": draw(st.sampled_from([None, 1, 4096, 10**6])),
    }
    inputs = [tensor for tensor in (hidden, weight, bias, labels, mask) if tensor is not None]
    before = [(tensor.clone(), tensor._version) for tensor in inputs]
    values, grads = run(hidden, weight, bias, labels, upstream, stats, **options, **tiling)
    truth = linear_reference(hidden, weight, bias, labels, upstream, exact=True, **options)
    naive = linear_reference(hidden, weight, bias, labels, upstream, exact=False, **options)
    for name in stats:
        assert values[name].dtype == compute_dtype(dtype)
        assert_as_good(values[name], truth[0][name], naive[0][name], name, ulps=_ulps(dtype))
    for what, grad, true, plain in zip(("hidden", "weight", "bias"), grads, truth[1], naive[1], strict=False):
        assert grad.dtype == dtype
        assert_as_good(grad, true, plain, f"gradient of {what}", ulps=_ulps(dtype))
    for tensor, (old, version) in zip(inputs, before, strict=True):
        assert torch.equal(tensor, old) and tensor._version == version


def _ulps(dtype: torch.dtype) -> float:
    """bf16 products round scores and their gradients to 8 bits in both results, but not at the same entries."""
    return 2 * torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps if dtype == torch.bfloat16 else 16.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_odd_sizes_in_many_tiles(dtype: torch.dtype) -> None:
    """A vocabulary, a width and a token count that no tile divides."""
    hidden, weight, bias, labels = tensors(0, (149,), 37, 1031, dtype)
    upstream = {name: torch.randn(149, generator=torch.Generator().manual_seed(1)) for name in STATS}
    truth = linear_reference(hidden, weight, bias, labels, upstream, exact=True)
    naive = linear_reference(hidden, weight, bias, labels, upstream, exact=False)
    tilings: list[dict[str, Any]] = [{}, {"chunk_size": 50}, {"memory_budget": 20_000}]
    for tiling in [*tilings, {"chunk_size": 7, "memory_budget": 50_000}]:
        values, grads = run(hidden, weight, bias, labels, upstream, **tiling)
        for name in STATS:
            assert_as_good(values[name], truth[0][name], naive[0][name], name, ulps=_ulps(dtype))
        for grad, true, plain in zip(grads, truth[1], naive[1], strict=True):
            assert_as_good(grad, true, plain, f"gradient {tuple(grad.shape)}", ulps=_ulps(dtype))


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """Over 65 vocabulary tiles and 75 token tiles the error does not grow beyond that of the naive single product."""
    hidden, weight, _, labels = tensors(13, (149,), 37, 1031, torch.bfloat16, bias=False)
    upstream = {name: torch.randn(149, generator=torch.Generator().manual_seed(1)) for name in STATS}
    _, grads = run(hidden, weight, None, labels, upstream, chunk_size=2, memory_budget=1)
    _, truth = linear_reference(hidden, weight, None, labels, upstream, exact=True)
    _, naive = linear_reference(hidden, weight, None, labels, upstream, exact=False)
    for grad, true, plain in zip(grads, truth, naive, strict=True):
        error, naive_error = ((value.double() - true).square().mean().sqrt() for value in (grad, plain))
        assert error <= 1.25 * naive_error, f"{tuple(grad.shape)}: {error:.3e}, naive {naive_error:.3e}"


@pytest.mark.parametrize("kept", [[], [3], [0, 5, 6, 19], list(range(20))], ids=str)
@pytest.mark.parametrize("how", ["mask", "ignore_index", "both"])
def test_rows_left_out_cost_no_flops_and_touch_nothing(how: str, kept: list[int]) -> None:
    hidden, weight, _, labels = tensors(1, (20,), 8, 33, torch.float32, bias=False)
    mask = torch.zeros(20, dtype=torch.bool)
    mask[kept] = True
    poisoned = hidden.masked_fill(~mask[:, None], float("nan"))
    options: dict[str, Any] = {"mask": mask} if how != "ignore_index" else {}
    ignoring = labels.masked_fill(~mask, -100) if how != "mask" else labels
    upstream = {name: torch.ones(20) for name in STATS}
    results: list[tuple[dict[str, Tensor], list[Tensor]]] = []
    flops = gemm_flops(lambda: results.append(run(poisoned, weight, None, ignoring, upstream, **options)))
    row_product = 2 * len(kept) * 8 * 33
    assert flops <= 4 * row_product  # one product forward, three backward
    assert flops >= 3 * row_product
    values, (d_hidden, d_weight) = results[0]
    alone, (d_hidden_alone, d_weight_alone) = run(
        hidden[kept], weight, None, labels[kept], {name: torch.ones(len(kept)) for name in STATS}
    )
    for name in STATS:
        assert not values[name][~mask].any()
        torch.testing.assert_close(values[name][kept], alone[name])
    assert not d_hidden[~mask].any()
    torch.testing.assert_close(d_hidden[kept], d_hidden_alone)
    torch.testing.assert_close(d_weight, d_weight_alone)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_a_frozen_input_costs_no_gradient(trained: str) -> None:
    hidden, weight, bias, labels = tensors(2, (2, 6), 8, 33, torch.float32)
    assert bias is not None
    everything: dict[str, Tensor] = {"hidden": hidden, "weight": weight, "bias": bias}
    full = run(hidden, weight, bias, labels, {"log_prob": torch.ones(2, 6)}, ("log_prob",))[1]
    leaf = everything[trained].requires_grad_()

    def step() -> None:
        stats = flathead.linear_token_stats(hidden, weight, labels, bias=bias, stats=("log_prob",))
        stats.log_prob.sum().backward()

    product = 2 * 12 * 8 * 33
    assert gemm_flops(step) == (3 if trained != "bias" else 2) * product  # forward, recomputation, one gradient
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, full[list(everything).index(trained)])
    assert all(tensor.grad is None for name, tensor in everything.items() if name != trained)


def test_nothing_trained_saves_nothing_and_multiplies_once() -> None:
    hidden, weight, bias, labels = tensors(3, (12,), 8, 33, torch.float32)
    with saved_tensors() as saved:
        flops = gemm_flops(lambda: flathead.linear_token_stats(hidden, weight, labels, bias=bias, stats=STATS))
    assert not saved and flops == 2 * 12 * 8 * 33
    weight.requires_grad_()
    with saved_tensors() as saved, torch.no_grad():
        stats = flathead.linear_token_stats(hidden, weight, labels, bias=bias, stats=STATS)
    assert not saved and not stats.entropy.requires_grad


@pytest.mark.parametrize("stats", [("log_prob",), ("log_prob", "entropy"), STATS], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_saved_for_backward_are_the_inputs_and_at_most_64_bytes_a_row(
    stats: tuple[str, ...], dtype: torch.dtype
) -> None:
    hidden, weight, bias, labels = tensors(4, (50,), 64, 200, dtype)
    assert bias is not None
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    with saved_tensors() as saved:
        result = flathead.linear_token_stats(hidden, weight, labels, bias=bias, stats=stats)
    assert saved_bytes_beyond(saved, *inputs) <= 64 * 50
    torch.stack([getattr(result, name).sum() for name in stats]).sum().backward()
    assert all(tensor.grad is not None for tensor in inputs)


def test_an_upstream_gradient_of_one_output_only() -> None:
    hidden, weight, _, labels = tensors(5, (9,), 8, 33, torch.float64, bias=False)
    for name in STATS:
        upstream = {name: torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(6))}
        together = run(hidden, weight, None, labels, upstream)[1]
        truth = linear_reference(hidden, weight, None, labels, upstream, exact=True)[1]
        for grad, true in zip(together, truth, strict=True):
            torch.testing.assert_close(grad, true, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True], ids=["every row", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_inplace_backward_writes_the_same_gradient_into_hidden(dtype: torch.dtype, masked: bool) -> None:
    leaf, weight, _, labels = tensors(12, (2, 9), 8, 33, dtype, bias=False)
    leaf.requires_grad_()
    weight.requires_grad_()
    mask = torch.arange(18).view(2, 9) % 3 != 0 if masked else None
    results: list[tuple[Tensor, ...]] = []
    for inplace in (False, True):
        hidden = leaf * 1.0
        before = hidden.detach().clone()
        stats = flathead.linear_token_stats(hidden, weight, labels, mask=mask, inplace_backward=inplace, chunk_size=4)
        assert torch.equal(hidden, before)
        loss = (stats.log_prob + stats.entropy).sum()
        results.append(torch.autograd.grad(loss, [hidden, weight], retain_graph=True))
        assert (results[-1][0].data_ptr() == hidden.data_ptr()) is inplace
        assert torch.equal(hidden, results[-1][0]) is inplace
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, [hidden, weight])


def test_several_backward_passes_add_up_and_change_no_input() -> None:
    hidden, weight, _, labels = tensors(6, (9,), 8, 33, torch.float64, bias=False)
    for leaf in (hidden, weight):
        leaf.requires_grad_()
    stats = flathead.linear_token_stats(hidden, weight, labels)
    for _ in range(2):
        stats.log_prob.sum().backward(retain_graph=True)
    stats.entropy.sum().backward()
    upstream = {"log_prob": 2 * torch.ones(9), "entropy": torch.ones(9)}
    d_hidden, d_weight = linear_reference(hidden, weight, None, labels, upstream, exact=True)[1]
    torch.testing.assert_close(hidden.grad, d_hidden)
    torch.testing.assert_close(weight.grad, d_weight)
    assert hidden._version == weight._version == 0


def test_a_tied_embedding_gets_both_gradients() -> None:
    _, table, _, labels = tensors(7, (9,), 8, 33, torch.float64, bias=False)
    ids = torch.randint(0, 33, (9,), generator=torch.Generator().manual_seed(8))
    grads = []
    for flat in (True, False):
        leaf = table.clone().requires_grad_()
        hidden = F.embedding(ids, leaf).tanh()
        if flat:
            log_prob = flathead.linear_token_stats(hidden, leaf, labels).log_prob
        else:
            log_prob = F.linear(hidden, leaf).log_softmax(-1).gather(-1, labels[:, None])
        log_prob.sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("layout", ["transposed hidden", "transposed weight", "expanded hidden", "sliced both"])
def test_strides(layout: str) -> None:
    hidden, weight, bias, labels = tensors(8, (4, 5), 8, 33, torch.float64)
    if layout == "transposed hidden":
        hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "transposed weight":
        weight = weight.T.contiguous().T
    elif layout == "expanded hidden":
        hidden = hidden[:1].expand(4, 5, 8)
    else:
        hidden, weight = torch.cat([hidden, hidden], -1)[..., ::2], torch.cat([weight, weight], -1)[:, :8]
    upstream = {name: torch.randn(4, 5, generator=torch.Generator().manual_seed(9)) for name in STATS}
    values, grads = run(hidden, weight, bias, labels, upstream, chunk_size=3)
    true_values, true_grads = linear_reference(hidden, weight, bias, labels, upstream, exact=True)
    for name in STATS:
        torch.testing.assert_close(values[name], true_values[name])
    for grad, true in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(grad, true)


@pytest.mark.parametrize("hidden_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_autocast_with_fp32_master_weights(hidden_dtype: torch.dtype, biased: bool) -> None:
    """GEMMs in bf16; the master weights' gradient in fp32, its sum over token tiles not rounded to bf16."""
    hidden, weight, bias, labels = tensors(9, (40,), 32, 301, torch.float32, biased)
    hidden = hidden.to(hidden_dtype)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    upstream = {name: torch.randn(40, generator=torch.Generator().manual_seed(10)) for name in STATS}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = flathead.linear_token_stats(hidden, weight, labels, bias=bias, stats=STATS, chunk_size=10)
    values = {name: getattr(stats, name) for name in STATS}
    grads = gradients(values, upstream, leaves)
    half = [None if tensor is None else tensor.detach().bfloat16() for tensor in (hidden, weight, bias)]
    assert half[0] is not None and half[1] is not None
    truth = linear_reference(half[0], half[1], half[2], labels, upstream, exact=True)
    naive = linear_reference(half[0], half[1], half[2], labels, upstream, exact=False)
    for name in STATS:
        assert values[name].dtype == torch.float32
        assert_as_good(values[name].detach(), truth[0][name], naive[0][name], name, ulps=_ulps(torch.bfloat16))
    for leaf, grad, true, plain in zip(leaves, grads, truth[1], naive[1], strict=True):
        assert grad.dtype == leaf.dtype
        assert_as_good(grad, true, plain, f"gradient {tuple(leaf.shape)}", ulps=_ulps(torch.bfloat16))
    assert not torch.equal(grads[1], grads[1].bfloat16().float())


def test_autocast_leaves_logits_alone() -> None:
    """From logits there is no product to speed up: autocast changes no bit."""
    logits, labels = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    plain = flathead.token_stats(logits, labels, stats=STATS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = flathead.token_stats(logits, labels, stats=STATS)
    assert all(torch.equal(getattr(plain, name), getattr(inside, name)) for name in STATS)


def test_second_derivatives_are_refused_not_silently_zero() -> None:
    hidden, weight, _, labels = tensors(10, (3,), 4, 7, torch.float32, bias=False)
    hidden.requires_grad_()
    stats = flathead.linear_token_stats(hidden, weight, labels)
    (grad,) = torch.autograd.grad(stats.entropy.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()


def test_labels_are_optional_without_log_prob() -> None:
    hidden, weight, bias, labels = tensors(11, (3, 2), 4, 7, torch.float64)
    with_labels = flathead.linear_token_stats(hidden, weight, labels, bias=bias, stats=STATS)
    without = flathead.linear_token_stats(hidden, weight, None, bias=bias, stats=STATS[1:])
    assert without.log_prob is None
    assert all(torch.equal(getattr(without, name), getattr(with_labels, name)) for name in STATS[1:])


def test_fp16_holds_logits_past_its_range_and_small_gradients() -> None:
    """Products of 1e6 are no fp16 numbers, nor are the gradient entries of unlikely tokens; float64 of the same input
    is the truth."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(5, 64, generator=generator) * 200).half().requires_grad_()
    weight = (torch.randn(33, 64, generator=generator) * 200).half().requires_grad_()
    labels = torch.randint(0, 33, (5,), generator=generator)
    assert float((hidden.double() @ weight.double().T).detach().abs().max()) > 65504
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    results = []
    for h, w in ((hidden, weight), exact):
        stats = flathead.linear_token_stats(h, w, labels, temperature=1e5)
        results.append((stats, *torch.autograd.grad((stats.log_prob + stats.entropy).sum(), [h, w])))
    (stats, *grads), (truth, *true_grads) = results
    torch.testing.assert_close(stats.log_prob.double(), truth.log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), truth.entropy, rtol=1e-5, atol=1e-5)
    for grad, true in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(grad.double(), true, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("chunk_size", [None, 4], ids=["one tile of tokens", "several"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_main_grad_takes_the_weights_gradient_on_top_of_what_it_holds(
    dtype: torch.dtype, chunk_size: int | None
) -> None:
    hidden, weight, bias, labels = tensors(21, (3, 7), 8, 33, dtype, bias=True)
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
    mask = torch.arange(21).view(3, 7) % 4 != 0
    arguments: dict[str, Any] = {"bias": bias, "mask": mask, "vocab_size": 30, "chunk_size": chunk_size}
    labels = labels % 30

    def gradients(**more: Any) -> tuple[Tensor | None, ...]:
        stats = flathead.linear_token_stats(hidden, weight, labels, **arguments, **more)
        return torch.autograd.grad((stats.log_prob + stats.entropy).sum(), leaves, allow_unused=True)

    acc = torch.promote_types(dtype, torch.float32)
    main_grad = torch.full(weight.shape, 0.5, dtype=acc)
    expected, got = gradients(), gradients(main_grad=main_grad)
    assert got[1] is None and torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
    assert torch.equal(main_grad[30:], torch.full((3, 8), 0.5, dtype=acc))  # padding has no gradient
    truth = linear_reference(
        hidden, weight, bias, labels, {"log_prob": torch.ones(3, 7), "entropy": torch.ones(3, 7)}, exact=True,
        vocab_size=30, mask=mask,
    )[1][1]  # fmt: skip
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close((main_grad - 0.5).double(), truth, rtol=tolerance, atol=tolerance)
    before = main_grad.clone()
    gradients(main_grad=main_grad)
    torch.testing.assert_close(main_grad - before, before - 0.5, rtol=1e-3, atol=1e-5)


def test_main_grad_in_fp32_keeps_what_bf16_would_lose() -> None:
    """A thousand small gradients on top of a large one: in bf16 they would vanish one by one."""
    hidden, weight, _, labels = tensors(22, (5,), 8, 33, torch.bfloat16, bias=False)
    weight.requires_grad_()
    main_grad = torch.full(weight.shape, 100.0)
    stats = flathead.linear_token_stats(hidden, weight, labels, main_grad=main_grad)
    for _ in range(100):
        (1e-3 * stats.log_prob.sum()).backward(retain_graph=True)
    assert weight.grad is None
    (once,) = torch.autograd.grad(flathead.linear_token_stats(hidden, weight, labels).log_prob.sum(), weight)
    torch.testing.assert_close(main_grad - 100, 0.1 * once.float(), rtol=0.02, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: torch.zeros(33, 7), r"main_grad\.shape: expected \(33, 8\), got \(33, 7\)"),
        (lambda w: torch.zeros(33, 8, dtype=torch.int64), r"main_grad\.dtype"),
        (lambda w: torch.zeros(33, 8, requires_grad=True), "main_grad: expected a buffer without gradient"),
        (lambda w: torch.zeros(33, 8, device="meta"), "main_grad"),
        (lambda w: torch.zeros(1, 8).expand(33, 8), "main_grad: expected memory of its own for every element"),
        (lambda w: w.detach(), "main_grad: expected memory that weight does not share"),
        (lambda w: w.requires_grad_(False) * 0, "main_grad: expected a buffer without gradient, and a weight"),
    ],
)
def test_bad_main_grads_are_refused(change: Any, message: str) -> None:
    hidden, weight, _, labels = tensors(23, (5,), 8, 33, torch.float32, bias=False)
    weight.requires_grad_()
    with pytest.raises(ValueError, match=message):
        flathead.linear_token_stats(hidden, weight, labels, main_grad=change(weight))
