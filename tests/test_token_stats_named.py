"""The named values: inputs that came back wrong elsewhere, with the numbers written out."""

# A statistic that was asked for is never None, which the annotation cannot say.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

import math

import pytest
import torch
from torch import Tensor

import flathead


def value_and_gradient(logits: Tensor, name: str, label: int = 0) -> tuple[float, Tensor]:
    """One statistic of one row, and its gradient."""
    leaf = logits.detach().clone().requires_grad_()
    value = getattr(flathead.token_stats(leaf, torch.tensor(label), stats=(name,)), name)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_two_equal_live_columns(dtype: torch.dtype) -> None:
    logits = torch.tensor([0.0, 0.0, -math.inf], dtype=dtype)
    entropy, d_entropy = value_and_gradient(logits, "entropy")
    assert entropy == pytest.approx(0.693147, abs=1e-6)
    torch.testing.assert_close(d_entropy, torch.zeros_like(logits), rtol=0, atol=1e-7)
    assert d_entropy[2] == 0
    sum_pi_squared, d_sum_pi_squared = value_and_gradient(logits, "sum_pi_squared")
    assert sum_pi_squared == 0.5
    assert torch.equal(d_sum_pi_squared, torch.zeros_like(logits))
    log_prob, d_log_prob = value_and_gradient(logits, "log_prob")
    assert log_prob == pytest.approx(-0.693147, abs=1e-6)
    assert d_log_prob.tolist() == [0.5, -0.5, 0.0]


def test_the_range_of_fp16() -> None:
    logits = torch.tensor([65504.0, -65504.0], dtype=torch.float16)
    entropy, gradient = value_and_gradient(logits, "entropy")
    assert entropy == 0
    assert gradient.tolist() == [0.0, 0.0]
    assert value_and_gradient(logits, "log_prob", label=0)[0] == 0
    assert value_and_gradient(logits, "log_prob", label=1)[0] == -131008


@pytest.mark.parametrize("column", [0, 50_000, 99_999])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_one_live_column_of_100000(column: int, dtype: torch.dtype) -> None:
    logits = torch.full((100_000,), -math.inf, dtype=dtype)
    logits[column] = -3.0
    for name, expected in (("log_prob", 0.0), ("entropy", 0.0), ("sum_pi_squared", 1.0), ("logsumexp", -3.0)):
        value, gradient = value_and_gradient(logits, name, label=column)
        assert value == expected, name
        assert gradient[column] == (1.0 if name == "logsumexp" else 0.0), name
        assert gradient.count_nonzero() == (1 if name == "logsumexp" else 0), name


def test_three_scores_in_float64() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    entropy, d_entropy = value_and_gradient(logits, "entropy")
    assert entropy == pytest.approx(0.8324, abs=5e-5)
    assert d_entropy.tolist() == pytest.approx([-0.2826, 0.1408, 0.1418], abs=5e-5)
    sum_pi_squared, d_sum_pi_squared = value_and_gradient(logits, "sum_pi_squared")
    assert sum_pi_squared == pytest.approx(0.5105, abs=5e-5)
    assert d_sum_pi_squared.tolist() == pytest.approx([0.2058, -0.1301, -0.0757], abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [0.0, 7.0, -100.0])
def test_70000_equal_logits(dtype: torch.dtype, value: float) -> None:
    """More terms than fp16 can count (65504), and a sum at which bf16 stops growing at 256."""
    logits = torch.full((70_000,), value, dtype=dtype)
    entropy, gradient = value_and_gradient(logits, "entropy")
    assert entropy == pytest.approx(11.1563, abs=5e-5)
    assert gradient.abs().max() < 1e-6
    assert value_and_gradient(logits, "log_prob", label=69_999)[0] == pytest.approx(-11.1563, abs=5e-5)
    assert value_and_gradient(logits, "sum_pi_squared")[0] == pytest.approx(1 / 70_000, rel=1e-4)


def test_one_peak_over_32000_bf16_logits() -> None:
    logits = torch.randn(8, 32_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[:, 0] = 20.0
    labels = torch.tensor([0, 1, 2, 3, 31_999, 31_998, 16_000, 0])
    stats = flathead.token_stats(logits, labels)
    log_p = torch.log_softmax(logits.double(), -1)
    truth_log_prob = log_p.gather(-1, labels[:, None])[:, 0]
    truth_entropy = -(log_p.exp() * log_p).sum(-1)
    assert (stats.log_prob.double() - truth_log_prob).abs().max() <= 1e-4
    assert (stats.entropy.double() - truth_entropy).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_log_prob_is_not_rounded_to_the_logits_dtype(dtype: torch.dtype) -> None:
    logits = torch.zeros(4096, dtype=dtype)
    logits[1:] = 4.03125  # log_prob[0] = -(4.03125 + ln(4095 + e^-4.03125)) = -12.3488..., between bf16's values
    expected = -(4.03125 + math.log(4095 + math.exp(-4.03125)))
    log_prob, _ = value_and_gradient(logits, "log_prob", label=0)
    assert log_prob == pytest.approx(expected, abs=2e-6)
    assert abs(expected - torch.tensor(expected).bfloat16().item()) > 1e-3


def test_two_labels_one_ignored() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    stats = flathead.token_stats(logits, torch.tensor([2, -100]))
    assert stats.log_prob[1] == 0 and stats.entropy[1] == 0
    (stats.log_prob.sum() + stats.entropy.sum()).backward()
    assert logits.grad is not None
    assert not logits.grad[1].any() and logits.grad[0].any()
