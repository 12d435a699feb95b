"""The mathematics of one vocabulary row, and nothing else: no distribution, no kernels, no configuration.

A logit becomes `x = beta * u`: without a soft cap `u = logit` and `beta = logit_scale / temperature`; with one
`u = softcap * tanh(logit * logit_scale / softcap)` and `beta = 1 / temperature`.

Any piece of a row (a vocabulary tile, a tensor-parallel shard, the whole row) is reduced to five numbers,

    m = max u        s = sum e^z        t = sum e^z z        q = sum e^2z        y = z[label], -inf if it is elsewhere

with `z = beta (u - m)`. The difference is taken before anything is scaled, so a common offset of the logits cancels
exactly. `merge` joins the numbers of two pieces and is associative; `finish` turns those of a whole row into

    log_prob = y - ln s     entropy = ln s - t/s     sum_pi_squared = q/s^2     logsumexp = beta m + ln s

and `row_gradient` is their exact gradient. Everything is computed in fp32 (fp64 for fp64 logits), row by row: the
result of a row depends neither on its neighbours nor on how many of them are computed at a time.

The running maximum and rescaled sums are those of online softmax (Milakov & Gimelshein, arXiv:1805.02867).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

STATS = ("log_prob", "entropy", "sum_pi_squared", "logsumexp")

# Below this e^z is exactly 0, so a logit of -inf may stand here: it adds 0 * finite = 0 where 0 * inf would be nan.
_LOWEST = {torch.float32: -200.0, torch.float64: -800.0}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 stays fp64, everything else is computed in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Scaling(NamedTuple):
    """From logit to `x = beta * u` (see the head of this file); `beta` is one number or one per row, (...)."""

    beta: float | Tensor = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    def map(self, pick: Callable[[Tensor], Tensor]) -> "Scaling":
        """The scaling of the rows that `pick` takes from a per-row tensor."""
        return self._replace(beta=pick(self.beta)) if isinstance(self.beta, Tensor) else self

    def rows(self, at: Any) -> "Scaling":
        return self.map(lambda beta: beta[at])

    def cap(self, logits: Tensor) -> Tensor:
        """u (..., V): the logits themselves, or a new capped tensor in the accumulation dtype."""
        if self.softcap is None:
            return logits
        u = logits.to(accumulate_dtype(logits.dtype), copy=True)
        return u.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap)


def _shift(u: Tensor, m: Tensor, beta: float | Tensor) -> Tensor:
    """z = beta (u - m), a new tensor (..., V). A piece without any finite logit has m = -inf and gives z = -inf.

    Contiguous whatever the strides of u: the order of a sum, and so its last bit, follows the memory.
    """
    base = m.masked_fill(m == -math.inf, 0.0).unsqueeze(-1)
    rows = torch.contiguous_format
    z = (u - base).contiguous() if u.dtype == base.dtype else u.to(base.dtype, memory_format=rows).sub_(base)
    if isinstance(beta, Tensor):
        return z.mul_(beta.unsqueeze(-1))
    return z if beta == 1.0 else z.mul_(beta)


def _row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension. Torch splits a lone row over its threads, which rounds it differently; never two."""
    if x.numel() == x.shape[-1]:
        return x.expand(2, *x.shape).sum(-1)[0]
    return x.sum(-1)


def empty_partials(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(5, ...): the partials of a piece with no columns; the neutral element of `merge`."""
    out = torch.zeros((5, *shape), dtype=dtype, device=device)
    out[0] = out[4] = -math.inf
    return out


def partials(logits: Tensor, label: Tensor | None, scaling: Scaling, stats: tuple[str, ...]) -> Tensor:
    """Reduce a piece of the vocabulary to (m, s, t, q, y) per row.

    logits (..., V); label (...) int64 relative to this piece, outside [0, V) when it lies elsewhere. Returns (5, ...);
    t, q and y are left neutral unless `stats` needs them.
    """
    out = empty_partials(logits.shape[:-1], accumulate_dtype(logits.dtype), logits.device)
    width = logits.shape[-1]
    if width == 0:
        return out
    u = scaling.cap(logits)
    out[0] = u.amax(-1)
    z = _shift(u, out[0], scaling.beta)
    if label is not None and "log_prob" in stats:
        here = (label >= 0) & (label < width)
        picked = z.gather(-1, label.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
        out[4] = picked.masked_fill(~here, -math.inf)
    z.clamp_(min=_LOWEST[z.dtype])
    e = z.exp()
    out[1] = _row_sum(e)
    if "entropy" in stats:
        out[2] = _row_sum(z.mul_(e))
    if "sum_pi_squared" in stats:
        out[3] = _row_sum(e.mul_(e))
    return out


def merge(a: Tensor, b: Tensor, beta: float | Tensor) -> Tensor:
    """Partials (5, ...) of two pieces -> partials of both together. Associative; `empty_partials` is neutral."""
    m = torch.maximum(a[0], b[0])
    out = torch.zeros_like(a)
    y = []
    for piece in (a, b):
        shift = torch.where(piece[0] == m, 0.0, (piece[0] - m) * beta)
        y.append(piece[4] + shift)
        shift = shift.clamp(min=_LOWEST[m.dtype])
        scale = shift.exp()
        out[1] += scale * piece[1]
        out[2] += scale * (piece[2] + piece[1] * shift)
        out[3] += scale * scale * piece[3]
    out[0], out[4] = m, torch.maximum(*y)
    return out


def _rounded_inwards(bound: float, dtype: torch.dtype, towards: float) -> float:
    """The last number of `dtype` that does not pass `bound`, so that the published limits hold exactly."""
    value = torch.tensor(bound, dtype=dtype)
    outside = value.item() > bound if towards < bound else value.item() < bound
    return torch.nextafter(value, torch.tensor(towards, dtype=dtype)).item() if outside else value.item()


def finish(
    partials_5N: Tensor, beta: float | Tensor, stats: tuple[str, ...], vocab_size: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Partials (5, ...) of whole rows -> ({name: (...)} for the asked statistics, ln s (...)).

    A row whose every logit is -inf has no distribution: log_prob = logsumexp = -inf, the others 0, no gradient.
    """
    m, s, t, q, y = partials_5N
    dead = s == 0
    s = s.masked_fill(dead, 1.0)
    ln_s = s.log()
    out: dict[str, Tensor] = {}
    if "log_prob" in stats:
        out["log_prob"] = y - ln_s
    if "entropy" in stats:
        most = _rounded_inwards(math.log(vocab_size), s.dtype, 0.0)
        out["entropy"] = (ln_s - t / s).clamp_(0.0, most)
    if "sum_pi_squared" in stats:
        least = _rounded_inwards(1.0 / vocab_size, s.dtype, 1.0)
        out["sum_pi_squared"] = (q / s / s).clamp_(least, 1.0).masked_fill_(dead, 0.0)
    if "logsumexp" in stats:
        out["logsumexp"] = m * beta + ln_s
    return out, ln_s


class RowCoefficients(NamedTuple):
    """`dx_v = p_v (constant + linear z_v + quadratic p_v) + label 1[v = label]`, each (...); None is 0."""

    constant: Tensor
    linear: Tensor | None
    quadratic: Tensor | None
    label: Tensor | None

    def rows(self, at: Any) -> "RowCoefficients":
        rest = (c if c is None else c[at] for c in self[1:])
        return RowCoefficients(self.constant[at], *rest)


def row_coefficients(
    grads: dict[str, Tensor], ln_s: Tensor, entropy: Tensor | None, sum_pi_squared: Tensor | None
) -> RowCoefficients:
    """The coefficients of a row's gradient from the upstream gradients {name: (...)} that arrived.

    dx_v = g_lp (1[v=label] - p_v) - g_H p_v (ln p_v + H) + 2 g_q p_v (p_v - sum_pi_squared) + g_lse p_v
    with ln p_v = z_v - ln s
    """
    g_lp, g_h, g_q, g_lse = (grads.get(name) for name in STATS)
    constant = torch.zeros_like(ln_s)
    if g_lp is not None:
        constant -= g_lp
    if g_lse is not None:
        constant += g_lse
    if g_h is not None and entropy is not None:
        constant += g_h * (ln_s - entropy)
    if g_q is not None and sum_pi_squared is not None:
        constant -= 2.0 * g_q * sum_pi_squared
    return RowCoefficients(constant, None if g_h is None else -g_h, None if g_q is None else 2.0 * g_q, g_lp)


def row_gradient(
    logits: Tensor, label: Tensor | None, m: Tensor, ln_s: Tensor, coefficients: RowCoefficients, scaling: Scaling
) -> Tensor:
    """Gradient of a piece of the vocabulary, (..., V) in the accumulation dtype, recomputed from the logits.

    logits (..., V) and label (...) as in `partials`; m (the maximum of the whole row), ln_s and the coefficients (...).
    """
    u = scaling.cap(logits)
    z = _shift(u, m, scaling.beta).clamp_(min=_LOWEST[m.dtype])
    p = (z - ln_s.unsqueeze(-1)).exp_()
    constant, linear, quadratic, at_label = (c if c is None else c.unsqueeze(-1) for c in coefficients)
    assert constant is not None
    if linear is None and quadratic is None:
        dx = p.mul_(constant)
    else:
        dx = z.fill_(0.0) if linear is None else z.mul_(linear)
        dx.add_(constant)
        if quadratic is not None:
            dx.addcmul_(p, quadratic.expand_as(p))
        dx.mul_(p)
    if at_label is not None and label is not None and logits.shape[-1] > 0:
        index = label.unsqueeze(-1)
        here = (index >= 0) & (index < logits.shape[-1])
        dx.scatter_add_(-1, index.clamp(0, logits.shape[-1] - 1), at_label.masked_fill(~here, 0.0))
    if isinstance(scaling.beta, Tensor):
        dx.mul_(scaling.beta.unsqueeze(-1))
    elif scaling.beta != 1.0:
        dx.mul_(scaling.beta)
    if scaling.softcap is not None:  # d u / d logit = logit_scale (1 - (u / softcap)^2)
        dx.mul_(u.div_(scaling.softcap).square_().neg_().add_(1.0)).mul_(scaling.logit_scale)
    return dx
