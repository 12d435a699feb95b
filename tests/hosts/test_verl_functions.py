"""verl's vocabulary functions, called as verl's own modules call them."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.verl_engine import environment

os.environ.update(environment(flathead=False))  # before verl is imported, here and nowhere else

from flathead.integrations import verl as flathead_in_verl

if flathead_in_verl.replaced():  # importing it the first time applied it; each test says what it wants
    flathead_in_verl.remove()


@pytest.fixture(scope="module")
def functions() -> Iterator[SimpleNamespace]:
    """As bound in the modules that use them, not where they are defined."""
    from verl.utils import torch_functional
    from verl.workers.engine.fsdp import transformer_impl

    flathead_in_verl.apply()
    yield SimpleNamespace(
        logprobs_from_logits=transformer_impl.logprobs_from_logits,
        logprobs_from_logits_v2=torch_functional.logprobs_from_logits_v2,
        logprobs_from_logits_naive=torch_functional.logprobs_from_logits_naive,
        entropy_from_logits=transformer_impl.verl_F.entropy_from_logits,
        entropy_from_logits_with_chunking=transformer_impl.verl_F.entropy_from_logits_with_chunking,
        calculate_sum_pi_squared_from_logits=transformer_impl.verl_F.calculate_sum_pi_squared_from_logits,
        log_probs_from_logits_response=torch_functional.log_probs_from_logits_response,
    )
    flathead_in_verl.remove()


def _logits(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    logits = (torch.randn(shape, generator=generator) * 4).to(dtype).requires_grad_()
    return logits, torch.randint(shape[-1], shape[:-1], generator=generator)


def _truth(name: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient of the function's sum weighted by place, in float64 on the same numbers."""
    exact = logits.detach().double().requires_grad_()
    ln_p = exact.log_softmax(-1)
    value = {
        "log_prob": lambda: ln_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
        "entropy": lambda: -(ln_p.exp() * ln_p).sum(-1),
        "sum_pi_squared": lambda: (2 * ln_p).exp().sum(-1),
    }[name]()
    (value * _places(value)).sum().backward()
    assert exact.grad is not None
    return value.detach(), exact.grad


def _places(value: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.5, value.numel(), dtype=value.dtype).view(value.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 129), (33,)])
@pytest.mark.parametrize(
    ("function", "statistic"),
    [
        ("logprobs_from_logits", "log_prob"),
        ("logprobs_from_logits_v2", "log_prob"),
        ("logprobs_from_logits_naive", "log_prob"),
        ("entropy_from_logits", "entropy"),
        ("entropy_from_logits_with_chunking", "entropy"),
        ("calculate_sum_pi_squared_from_logits", "sum_pi_squared"),
    ],
)
def test_function(
    functions: SimpleNamespace, function: str, statistic: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """fp32 values of bf16 logits too (stock verl rounds an entropy to bf16), any shape, and the logits untouched."""
    logits, labels = _logits(shape, dtype)
    before = logits.detach().clone()
    got = getattr(functions, function)(logits, *([labels] if statistic == "log_prob" else []))
    value, gradient = _truth(statistic, logits, labels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=1e-5)
    (got * _places(got)).sum().backward()
    assert torch.equal(logits, before)
    assert logits.grad is not None
    torch.testing.assert_close(
        logits.grad.double(), gradient, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-5
    )


@pytest.mark.parametrize("chunk_size", [1, 8, 49, 4096])
def test_chunks_change_no_bit(functions: SimpleNamespace, chunk_size: int) -> None:
    logits, _ = _logits((49, 65), torch.float32)
    whole = functions.entropy_from_logits(logits)
    chunked = functions.entropy_from_logits_with_chunking(logits, chunk_size=chunk_size)
    assert torch.equal(whole, chunked)
    (one,) = torch.autograd.grad(whole.sum(), logits)
    (other,) = torch.autograd.grad(chunked.sum(), logits)
    assert torch.equal(one, other)


def test_entropy_of_the_logits_whose_log_probs_went_backward_in_place(functions: SimpleNamespace) -> None:
    """verl's default inplace_backward=True, which the prefix grouper leaves, must not spoil the entropy of the same."""
    logits, labels = _logits((6, 50), torch.float32)
    both = functions.logprobs_from_logits(logits, labels) + functions.entropy_from_logits(logits)
    both.sum().backward()
    exact = logits.detach().double().requires_grad_()
    ln_p = exact.log_softmax(-1)
    (ln_p.gather(-1, labels.unsqueeze(-1)).sum() - (ln_p.exp() * ln_p).sum()).backward()
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=2e-5)


def test_compiled_and_checkpointed_as_verl_does(functions: SimpleNamespace) -> None:
    logits, _ = _logits((9, 40), torch.float32)
    value, gradient = _truth("entropy", logits, torch.zeros(9, dtype=torch.int64))
    compiled: Any = torch.compile(functions.entropy_from_logits_with_chunking, dynamic=True)
    for got in (
        compiled(logits, chunk_size=4),
        torch.utils.checkpoint.checkpoint(functions.entropy_from_logits, logits, use_reentrant=False),
    ):
        torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad((got * _places(got)).sum(), logits)
        torch.testing.assert_close(grad.double(), gradient, rtol=1e-4, atol=2e-5)


def test_response_log_probs_go_through_flathead(functions: SimpleNamespace) -> None:
    """A function of verl's that calls a replaced one in its own module."""
    logits, labels = _logits((2, 6, 30), torch.bfloat16)
    got = functions.log_probs_from_logits_response(labels, logits, 4)
    ln_p = logits.detach().double().log_softmax(-1)[:, 1:-1]
    expected = ln_p.gather(-1, labels[:, 2:].unsqueeze(-1)).squeeze(-1)
    assert got.dtype == torch.float32  # stock verl's is bf16, off by up to 0.03
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", ["linear", "kernel"])
def test_fused_head(functions: SimpleNamespace, fused: str) -> None:
    """verl's two fused heads, of hidden states (B, T, H)."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.utils.kernel import linear_cross_entropy

    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 5, 16, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator, requires_grad=True)
    labels = torch.randint(40, (2, 5), generator=generator)
    if fused == "linear":
        log_prob, entropy = FusedLinearForPPO()(hidden, weight, labels, temperature=0.7)
    else:
        log_prob, entropy = linear_cross_entropy.linear_cross_entropy(hidden, weight, labels, 0.7, "none")
    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    ln_p = (exact[0] @ exact[1].T / 0.7).log_softmax(-1)
    wanted = ln_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(ln_p.exp() * ln_p).sum(-1)
    for got, value in zip((log_prob, entropy), wanted, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=2e-5)
    grads = torch.autograd.grad(((log_prob + 0.3 * entropy) * _places(entropy)).sum(), (hidden, weight))
    truth = torch.autograd.grad(((wanted[0] + 0.3 * wanted[1]) * _places(wanted[0])).sum(), exact)
    for got, value in zip(grads, truth, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=1e-4, atol=1e-4)
