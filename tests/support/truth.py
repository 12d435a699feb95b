"""The statistics written the obvious way, from log_softmax and autograd. Run in float64 they are the truth, in the
compute dtype the naive result that the library must not be worse than.

For a row of scores x = softcap(logit * logit_scale) / temperature and p = softmax(x):
log_prob = ln p[label], entropy = -sum p ln p, sum_pi_squared = sum p^2, logsumexp = ln sum e^x.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

STATS = ("log_prob", "entropy", "sum_pi_squared", "logsumexp")
Upstream = Mapping[str, Tensor]  # statistic -> its upstream gradient, in the labels' shape; an absent one gets none


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    dtype: torch.dtype,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    mask: Tensor | None = None,
) -> dict[str, Tensor]:
    """All four statistics of (..., V) logits, each (...), computed in ``dtype``; rows not kept are exactly zero."""
    keep = labels != ignore_index
    if mask is not None:
        keep = keep & mask
    x = logits[..., :vocab_size].to(dtype)
    x = torch.where(keep.unsqueeze(-1), x, torch.zeros((), dtype=dtype)) * logit_scale
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype).expand(labels.shape).unsqueeze(-1)
    # The largest score leaves before the division, where even float64 would lose digits beside an offset of 1e8.
    largest = x.detach().amax(-1, keepdim=True)
    x = (x - largest) / temperature
    log_p = F.log_softmax(x, dim=-1)
    p = log_p.exp()
    # 0 * -inf is NaN in value and in gradient, so the dead entries leave the product before it is formed.
    plogp = p * torch.where(p > 0, log_p, torch.zeros_like(log_p))
    label = torch.where(keep, labels, torch.zeros_like(labels)).unsqueeze(-1)
    values = {
        "log_prob": log_p.gather(-1, label).squeeze(-1),
        "entropy": -plogp.sum(-1),
        "sum_pi_squared": p.square().sum(-1),
        "logsumexp": torch.logsumexp(x, dim=-1) + (largest / temperature).squeeze(-1),
    }
    return {name: torch.where(keep, value, torch.zeros_like(value)) for name, value in values.items()}


def gradients(values: Mapping[str, Tensor], upstream: Upstream, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of sum_stat sum(upstream * value); zeros when nothing flows."""
    used = {name: weight for name, weight in upstream.items() if values[name].requires_grad}
    if not used:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(
        [values[name] for name in used],
        list(leaves),
        [weight.to(values[name].dtype) for name, weight in used.items()],
        allow_unused=True,
        retain_graph=True,
    )
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]


def reference(
    logits: Tensor, labels: Tensor, upstream: Upstream, *, dtype: torch.dtype, **options: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """Values and the gradient of the logits. In float64 the gradient is float64 too; otherwise in the logits' dtype."""
    start = logits.detach().to(dtype) if dtype == torch.float64 else logits.detach()
    leaf = start.clone().requires_grad_()
    values = statistics(leaf, labels, dtype=dtype, **options)
    (grad,) = gradients(values, upstream, [leaf])
    return {name: value.detach() for name, value in values.items()}, grad


def linear_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    upstream: Upstream,
    *,
    exact: bool,
    **options: Any,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Values and the gradients of hidden, weight (and bias) of F.linear followed by the statistics.

    exact: everything in float64. Otherwise the GEMM in the inputs' dtype and the rest in the compute dtype.
    """
    given = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    leaves = [(tensor.detach().double() if exact else tensor.detach()).clone().requires_grad_() for tensor in given]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    dtype = torch.float64 if exact else compute_dtype(hidden.dtype)
    values = statistics(logits, labels, dtype=dtype, **options)
    grads = gradients(values, upstream, leaves)
    return {name: value.detach() for name, value in values.items()}, grads


def assert_as_good(actual: Tensor, truth: Tensor, naive: Tensor, what: str, *, ulps: float = 16.0) -> None:
    """error <= naive error + tolerance, entry by entry. The naive error is its largest one; the tolerance is one unit
    in the last place of the entry in its own dtype, plus ``ulps`` units of the compute dtype at the largest entry, or
    at 1: what the gradients of entropy and sum_pi_squared cancel from."""
    assert actual.shape == truth.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    if actual.numel() == 0:
        return
    truth = truth.double()
    error = (actual.double() - truth).abs()
    naive_error = (naive.double() - truth).abs()
    stored, computed = torch.finfo(actual.dtype), torch.finfo(compute_dtype(actual.dtype))
    largest = max(1.0, truth.abs().max().item())
    tolerance = truth.abs() * stored.eps + stored.tiny * stored.eps + ulps * computed.eps * largest
    bound = naive_error.max() + tolerance
    assert bool((error <= bound).all()), (  # NaN fails too
        f"{what}: error {error.max().item():.3e}, naive {naive_error.max().item():.3e}, "
        f"tolerance at most {tolerance.max().item():.3e}; got {actual.flatten()[:8].tolist()}, "
        f"expected {truth.flatten()[:8].tolist()}"
    )
