"""`inplace_backward`: what may be overwritten by its gradient, and a mark on what was.

The mark lies on the storage, so that every view of it knows. It holds the version the write left behind: when the
caller has filled the memory anew since, the version has moved on and the mark is void.
"""

from typing import Any, NamedTuple

from torch import Tensor


class _Mark(NamedTuple):
    version: int
    spans: tuple[range, ...]  # bytes of the storage that hold a gradient


def _span(tensor: Tensor) -> range:
    """The bytes of its storage between a tensor's first and last element."""
    start = tensor.storage_offset() * tensor.itemsize
    if tensor.numel() == 0:
        return range(start, start)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(start, start + (last + 1) * tensor.itemsize)


def _meet(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory: some stride does not clear the extent of all smaller ones."""
    extent = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= extent:
            return True
        extent += (size - 1) * stride
    return False


def _mark_of(tensor: Tensor) -> _Mark | None:
    mark = getattr(tensor.untyped_storage(), "_flathead_overwritten", None)
    return mark if mark is not None and mark.version == tensor._version else None


def mark_overwritten(tensor: Tensor, version_before: int) -> None:
    """Remember on the storage that `tensor` now holds a gradient. `version_before`: as it was before the write."""
    storage: Any = tensor.untyped_storage()
    old = getattr(storage, "_flathead_overwritten", None)
    spans = old.spans if old is not None and old.version == version_before else ()
    storage._flathead_overwritten = _Mark(tensor._version, (*spans, _span(tensor)))


def check_overwritable(tensor: Tensor, inplace: bool, **read_later: Tensor | None) -> None:
    """Rows still hold what they should; and, with `inplace`, may be overwritten: memory of their own, for each row
    and apart from what backward reads besides.

    Errors: ValueError.
    """
    mark = _mark_of(tensor)
    if mark is not None and any(_meet(span, _span(tensor)) for span in mark.spans):
        raise ValueError(
            "inplace_backward: expected a tensor not used before, got memory that holds the gradient an earlier "
            "backward wrote over it; use a fresh one"
        )
    if not inplace:
        return
    if _overlaps_itself(tensor):
        raise ValueError(
            "inplace_backward: expected memory of its own for every row, got an expanded or overlapping tensor; "
            "leave inplace_backward off, or pass its .contiguous()"
        )
    for name, other in read_later.items():
        if other is None or other.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            continue
        if _meet(_span(other), _span(tensor)):
            raise ValueError(
                f"inplace_backward: expected memory that {name} does not share, since backward reads it after "
                "overwriting, got a view of the same; leave inplace_backward off"
            )
