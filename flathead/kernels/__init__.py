"""THE dispatch point: which implementation reduces a chunk of rows. All share the signature of `torch_impl`.

partials(logits (..., V), label (...) | None, scaling, stats) -> (5, ...)
row_gradient(logits (..., V), label (...) | None, m, ln_s (...), coefficients, scaling, out (..., V)) -> None
"""

from types import ModuleType

from flathead.kernels import torch_impl

IMPLEMENTATIONS: dict[str, ModuleType] = {"torch": torch_impl}


def resolve(impl: str) -> ModuleType:
    """The implementation called `impl`; "auto" picks the best one. Unknown: ValueError, never a fallback."""
    if impl == "auto":
        return torch_impl
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        expected = ", ".join(repr(name) for name in ("auto", *IMPLEMENTATIONS))
        raise ValueError(f"impl: expected one of {expected}, got {impl!r}")
    return IMPLEMENTATIONS[impl]
