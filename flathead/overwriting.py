"""`inplace_backward`: what may be overwritten by its gradient, and a mark on what was.

The mark lies on the storage, so that every view of it knows, and holds some elements of the gradient: once they have
changed, the caller has filled the memory anew. (Version counters would not do: they count every write to the storage,
and `.data` has its own.)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Mark(NamedTuple):
    """A piece of a storage that holds a gradient, and some of its elements to see whether it still does."""

    place: "_Place"
    dtype: torch.dtype
    offset: int  # of the sample, in elements of the storage
    stride: int
    sample: Tensor
    version: int

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory, which `tensor` is a view of, still is as the write left it."""
        if tensor.dtype != self.dtype:
            return True
        now = tensor.detach().as_strided(self.sample.shape, (self.stride,), self.offset)
        same = bool((now == self.sample).all() | (now.isnan() & self.sample.isnan()).all())
        return same and (bool(self.sample.any()) or tensor._version == self.version)


class _Place(NamedTuple):
    """Where a tensor lies: bytes `span` of its storage; of every `period` bytes of it only `columns`, if not 0."""

    span: range
    period: int
    columns: range


_SAMPLED = 64


def _place(tensor: Tensor) -> _Place:
    start, size = tensor.storage_offset() * tensor.itemsize, tensor.itemsize
    if tensor.numel() == 0:
        return _Place(range(start, start), 0, range(0))
    steps = [(n - 1, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    span = range(start, start + sum(n * stride for n, stride in steps) + size)
    rows = sorted(stride for _, stride in steps)[1:]  # all but the one within a row
    width = min((n * stride for n, stride in steps), default=0) + size
    period = min(rows, default=0)
    regular = period > 0 and all(stride % period == 0 for stride in rows) and start % period + width <= period
    return _Place(span, period, range(start % period, start % period + width)) if regular else _Place(span, 0, range(0))


def _meet(a: _Place, b: _Place) -> bool:
    """Whether two tensors of one storage may share a byte. Columns side by side of the same rows do not."""
    if max(a.span.start, b.span.start) >= min(a.span.stop, b.span.stop):
        return False
    if a.period == b.period > 0:
        return max(a.columns.start, b.columns.start) < min(a.columns.stop, b.columns.stop)
    return True


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory: some stride does not clear the extent of all smaller ones."""
    extent = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= extent:
            return True
        extent += (size - 1) * stride
    return False


def mark_overwritten(tensor: Tensor) -> None:
    """Remember on the storage that `tensor` now holds a gradient."""
    if tensor.numel() == 0:
        return
    storage: Any = tensor.untyped_storage()
    row = tensor.detach()[(0,) * (tensor.ndim - 1)][:_SAMPLED]
    mark = _Mark(_place(tensor), tensor.dtype, int(row.storage_offset()), row.stride(0), row.clone(), tensor._version)
    others = [m for m in getattr(storage, "_flathead_overwritten", ()) if m.holds(tensor)]
    storage._flathead_overwritten = (*others, mark)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def check_apart(name: str, written: Tensor | None, **read: Tensor | None) -> None:
    """What backward writes to has memory of its own, for each element and apart from what it reads.

    Errors: ValueError.
    """
    if written is None:
        return
    if _overlaps_itself(written):
        raise ValueError(f"{name}: expected memory of its own for every element, got an expanded or overlapping tensor")
    for other_name, other in read.items():
        if other is not None and _same_storage(other, written) and _meet(_place(other), _place(written)):
            raise ValueError(f"{name}: expected memory that {other_name} does not share, got a view of the same")


def check_overwritable(tensor: Tensor, inplace: bool, **read_later: Tensor | None) -> None:
    """Rows still hold what they should; and, with `inplace`, may be overwritten: memory of their own, for each row
    and apart from what backward reads besides.

    Errors: ValueError.
    """
    marks = getattr(tensor.untyped_storage(), "_flathead_overwritten", ())
    if any(_meet(mark.place, _place(tensor)) and mark.holds(tensor) for mark in marks):
        raise ValueError(
            "inplace_backward: expected a tensor not used before, got memory that holds the gradient an earlier "
            "backward wrote over it; use a fresh one"
        )
    if inplace:
        check_apart("inplace_backward", tensor, **read_later)
