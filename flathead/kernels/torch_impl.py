"""The pure mathematics as it stands, on any device. Speed comes from the caller's chunks, which stay in the cache."""

from torch import Tensor

from flathead import vocab_math
from flathead.vocab_math import RowCoefficients, Scaling, partials

__all__ = ["partials", "row_gradient"]


def row_gradient(
    logits: Tensor,
    label: Tensor | None,
    m: Tensor,
    ln_s: Tensor,
    coefficients: RowCoefficients,
    scaling: Scaling,
    out: Tensor,
) -> None:
    """Write the gradient of a chunk into `out` (..., V), in its dtype. `out` may be the logits' own storage."""
    out.copy_(vocab_math.row_gradient(logits, label, m, ln_s, coefficients, scaling))
