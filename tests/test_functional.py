"""The drop-in names for unsharded logits: same signatures as their callers use, same numbers as token_stats."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flathead import functional
from tests.support.cases import DTYPES, Case, cases
from tests.support.truth import assert_as_good, compute_dtype, reference

NAMES = {
    "entropy_from_logits": "entropy",
    "entropy_from_logits_with_chunking": "entropy",
    "logprobs_from_logits": "log_prob",
    "sum_pi_squared_from_logits": "sum_pi_squared",
}


def call(name: str, logits: Tensor, labels: Tensor, **options: int) -> Tensor:
    function = getattr(functional, name)
    return function(logits, labels, **options) if NAMES[name] == "log_prob" else function(logits, **options)


def test_signatures() -> None:
    parameters = {name: list(inspect.signature(getattr(functional, name)).parameters) for name in NAMES}
    assert parameters["entropy_from_logits"] == ["logits"]
    assert parameters["entropy_from_logits_with_chunking"] == ["logits", "chunk_size"]
    assert parameters["logprobs_from_logits"][:2] == ["logits", "labels"]
    assert parameters["sum_pi_squared_from_logits"] == ["logits"]
    signature = inspect.signature(functional.entropy_from_logits_with_chunking)
    assert signature.parameters["chunk_size"].default == 2048


@pytest.mark.parametrize("name", NAMES)
@given(cases(), st.integers(0, 2**31))
def test_value_and_gradient_are_as_good_as_naive(name: str, case: Case, seed: int) -> None:
    logits = case.logits.nan_to_num(nan=1.0, posinf=2.0, neginf=-torch.inf)  # no vocab_size here: all columns are real
    labels = case.labels.clamp(min=0)
    logits = logits.scatter(-1, labels.unsqueeze(-1), 1.0)  # a live label column
    statistic, dtype = NAMES[name], logits.dtype
    weight = torch.randn(labels.shape, generator=torch.Generator().manual_seed(seed))
    leaf = logits.clone().requires_grad_()
    value = call(name, leaf, labels)
    (grad,) = torch.autograd.grad(value, leaf, weight.to(value.dtype))
    # An entropy comes rounded to the logits' dtype, and so does its upstream gradient; the others keep fp32.
    rounded = dtype if statistic == "entropy" else compute_dtype(dtype)
    assert value.dtype == rounded and value.device == logits.device
    upstream = {statistic: weight.to(rounded)}
    truth = reference(logits, labels, upstream, dtype=torch.float64)
    naive = reference(logits, labels, upstream, dtype=compute_dtype(dtype))
    assert_as_good(value.detach(), truth[0][statistic], naive[0][statistic].to(rounded), name)
    assert_as_good(grad, truth[1], naive[1], f"gradient of {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 8, 49, 2048])
def test_chunking_changes_no_bit(dtype: torch.dtype, chunk_size: int) -> None:
    logits = (3 * torch.randn(7, 7, 50, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    whole = functional.entropy_from_logits(logits)
    chunked = functional.entropy_from_logits_with_chunking(logits, chunk_size=chunk_size)
    assert torch.equal(whole, chunked)
    grads = [torch.autograd.grad(value.sum(), logits)[0] for value in (whole, chunked)]
    assert torch.equal(*grads)


def test_chunk_size_arrives() -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        functional.entropy_from_logits_with_chunking(torch.zeros(2, 3), chunk_size=0)
    with pytest.raises(ValueError, match="chunk_size"):
        functional.entropy_from_logits_with_chunking(torch.zeros(2, 3), -1)


def test_log_prob_is_not_rounded_to_bf16_and_the_logits_are_left_alone() -> None:
    logits = torch.zeros(4096).bfloat16()
    logits[1:] = 4.03125
    leaf = logits.clone().requires_grad_()
    log_prob = functional.logprobs_from_logits(leaf, torch.tensor(0))
    log_prob.backward()
    assert log_prob.dtype == torch.float32
    assert log_prob.item() != log_prob.bfloat16().item()
    assert torch.equal(leaf, logits) and leaf._version == 0


def test_inplace_backward_arrives() -> None:
    leaf = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    labels = torch.tensor([0, 4, 2])
    (expected,) = torch.autograd.grad(functional.logprobs_from_logits(leaf, labels).sum(), leaf)
    logits = leaf * 1.0
    (grad,) = torch.autograd.grad(functional.logprobs_from_logits(logits, labels, inplace_backward=True).sum(), logits)
    assert torch.equal(grad, expected) and grad.data_ptr() == logits.data_ptr()
