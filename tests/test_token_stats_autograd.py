"""token_stats and autograd: nothing computed or saved unasked, nothing asked for dropped, in-place use."""

# A statistic that was asked for is never None, which the annotation cannot say.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportArgumentType=false, reportReturnType=false

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flathead
from tests.support.counting import saved_bytes_beyond, saved_tensors, wide_operations
from tests.support.truth import STATS, reference

N, V = 12, 50


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=generator).to(dtype)
    return logits.requires_grad_(), torch.randint(0, V, (N,), generator=generator)


def loss_of(stats: Any, names: tuple[str, ...]) -> Tensor:
    return torch.stack([(k + 1) * getattr(stats, name).sum() for k, name in enumerate(names)]).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stats", [("log_prob",), ("entropy",), ("log_prob", "entropy"), STATS], ids=str)
def test_saved_for_backward_are_the_inputs_and_at_most_64_bytes_a_row(
    stats: tuple[str, ...], dtype: torch.dtype
) -> None:
    logits, labels = inputs(dtype)
    with saved_tensors() as saved:
        result = flathead.token_stats(logits, labels, stats=stats, temperature=torch.full((N,), 0.5))
        loss = loss_of(result, stats)
    assert any(tensor.data_ptr() == logits.data_ptr() for tensor in saved)  # by reference, no copy
    assert saved_bytes_beyond(saved, logits) <= 64 * N
    loss.backward()
    assert logits.grad is not None and logits.grad.any()


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "requires_grad False"])
def test_without_gradient_nothing_is_saved(how: str) -> None:
    logits, labels = inputs()
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, torch.enable_grad)
    if how == "requires_grad False":
        logits = logits.detach()
    with saved_tensors() as saved, context():
        result = flathead.token_stats(logits, labels, stats=STATS)
    assert not saved
    assert not any(getattr(result, name).requires_grad for name in STATS)
    with_grad = flathead.token_stats(logits.detach().clone().requires_grad_(), labels, stats=STATS)
    assert all(torch.equal(getattr(result, name), getattr(with_grad, name)) for name in STATS)


def test_tensors_made_in_inference_mode() -> None:
    logits, labels = inputs()
    with torch.inference_mode():
        made_here = logits.detach().clone()
        stats = flathead.token_stats(made_here, labels)
        weight = torch.eye(V)
        from_hidden = flathead.linear_token_stats(made_here, weight, labels)
    assert torch.equal(stats.entropy, flathead.token_stats(logits, labels).entropy)
    torch.testing.assert_close(from_hidden.log_prob, stats.log_prob)


def test_statistics_not_asked_for_are_not_computed() -> None:
    logits, labels = inputs()

    def forward(*stats: str) -> int:
        return len(wide_operations(N * V, lambda: flathead.token_stats(logits, labels, stats=stats, chunk_size=N)))

    assert forward("logsumexp") < forward("entropy")
    assert forward("log_prob") < forward("log_prob", "entropy") < forward("log_prob", "entropy", "sum_pi_squared")


@pytest.mark.parametrize("used", STATS)
def test_an_output_without_gradient_costs_nothing_in_backward(used: str) -> None:
    logits, labels = inputs()

    def backward(*stats: str) -> tuple[list[str], Tensor]:
        value = getattr(flathead.token_stats(logits, labels, stats=stats, chunk_size=N), used)
        grads: list[Tensor] = []
        names = wide_operations(N * V, lambda: grads.extend(torch.autograd.grad(value.sum(), logits)))
        return names, grads[0]

    (alone, grad_alone), (together, grad_together) = backward(used), backward(*STATS)
    assert alone == together
    assert torch.equal(grad_alone, grad_together)


def test_a_detached_statistic_gives_no_gradient_and_the_other_one_does() -> None:
    logits, labels = inputs()
    stats = flathead.token_stats(logits, labels)
    (stats.log_prob + 0.5 * stats.entropy.detach()).sum().backward()
    _, expected = reference(logits, labels, {"log_prob": torch.ones(N)}, dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected.float())


def test_the_same_backward_twice_gives_the_same_bits() -> None:
    logits, labels = inputs()
    loss = loss_of(flathead.token_stats(logits, labels, stats=STATS, chunk_size=5), STATS)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert logits._version == 0


def test_the_same_logits_in_two_calls() -> None:
    logits, labels = inputs(torch.float64)
    (flathead.token_stats(logits, labels).log_prob - flathead.token_stats(logits, labels).entropy).sum().backward()
    ones = torch.ones(N)
    _, expected = reference(logits, labels, {"log_prob": ones, "entropy": -ones}, dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)


def test_recomputation_under_activation_checkpointing() -> None:
    logits, labels = inputs()

    def log_prob(x: Tensor) -> Tensor:
        return flathead.token_stats(2 * x, labels).log_prob

    (expected,) = torch.autograd.grad(log_prob(logits).sum(), logits)
    again = checkpoint(log_prob, logits, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.sum(), logits)[0], expected)


def test_second_derivatives_are_refused_not_silently_zero() -> None:
    logits, labels = inputs()
    entropy = flathead.token_stats(logits, labels).entropy
    (grad,) = torch.autograd.grad(entropy.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.square().sum().backward()


def test_logits_changed_before_backward_are_an_error() -> None:
    leaf, labels = inputs()
    logits = leaf * 1.0
    stats = flathead.token_stats(logits, labels)
    with torch.no_grad():
        logits.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stats.log_prob.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_inplace_backward_writes_the_same_gradient_into_the_logits(dtype: torch.dtype, chunk_size: int | None) -> None:
    leaf, labels = inputs(dtype)
    plain = flathead.token_stats(leaf, labels, stats=STATS, chunk_size=chunk_size)
    (expected,) = torch.autograd.grad(loss_of(plain, STATS), leaf)
    logits = leaf * 1.0
    before = logits.detach().clone()
    stats = flathead.token_stats(logits, labels, stats=STATS, chunk_size=chunk_size, inplace_backward=True)
    assert torch.equal(logits, before)  # the forward pass leaves them alone
    (gradient,) = torch.autograd.grad(loss_of(stats, STATS), logits)
    assert torch.equal(gradient, expected)
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(logits, expected)


def test_inplace_backward_handles_ignored_rows_padding_and_strides() -> None:
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(3, V + 1, 4, generator=generator).requires_grad_()
    labels = torch.randint(0, V - 5, (3, 4), generator=generator)
    labels[1, 2] = -100
    grads = []
    for inplace in (False, True):
        logits = (base * 1.0).transpose(1, 2)[..., :-1]
        stats = flathead.token_stats(logits, labels, vocab_size=V - 5, chunk_size=5, inplace_backward=inplace)
        grads.append(torch.autograd.grad(loss_of(stats, ("log_prob", "entropy")), base)[0])
    assert torch.equal(*grads)
    assert not grads[0][:, V - 5 :].any() and not grads[0][1, :, 2].any()


def test_inplace_backward_fails_loudly_on_a_second_backward() -> None:
    leaf, labels = inputs()
    logits = leaf * 1.0
    loss = flathead.token_stats(logits, labels, inplace_backward=True).log_prob.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


@pytest.mark.parametrize("other", ["inplace", "plain", "torch"])
def test_inplace_backward_fails_loudly_on_a_second_use_of_the_logits(other: str) -> None:
    """Whichever backward pass comes second finds the logits overwritten."""
    leaf, labels = inputs()
    logits = leaf * 1.0

    def second_use() -> Tensor:
        if other == "torch":
            return logits.square().sum()
        return flathead.token_stats(logits, labels, inplace_backward=other == "inplace").entropy.sum()

    first = flathead.token_stats(logits, labels, inplace_backward=True).log_prob.sum()
    second = second_use()
    first.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        second.backward()


def test_inplace_backward_of_logits_that_overlap_themselves_is_not_silently_wrong() -> None:
    labels = torch.tensor([0, 1, 2])
    row = torch.randn(1, V, generator=torch.Generator().manual_seed(8)).requires_grad_()
    expected = torch.autograd.grad(flathead.token_stats(row.expand(3, V), labels).log_prob.sum(), row)[0]
    try:
        stats = flathead.token_stats(row.expand(3, V), labels, inplace_backward=True)
        gradient = torch.autograd.grad(stats.log_prob.sum(), row)[0]
    except (ValueError, RuntimeError):
        return
    torch.testing.assert_close(gradient, expected)
