"""Exact accounting of tensor memory: every storage that an operation creates, until it is freed.

Not seen: scratch that a kernel takes and returns inside one operation (test_memory compares with the resident size of a
whole process for that). CPU only: there the backward pass runs in the calling thread, where the mode is active.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """``live``: bytes of the storages created inside the mode and still alive; ``peak``: the most there ever was;
    ``largest``: bytes of the largest single storage created."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._counted: dict[int, int] = {}  # id of a living storage -> bytes counted for it
        self._ours_from: dict[int, int] = {}  # id of a living storage -> bytes it had before the mode saw it

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handed_in = _storages((args, kwargs))
        for storage in handed_in:  # made before the mode began: only its growth (resize, out=) counts
            self._register(storage, storage.nbytes())
        result = func(*args, **kwargs)
        for storage in [*handed_in, *_storages(result)]:
            self._register(storage, 0)
            self._count(storage)
        self.peak = max(self.peak, self.live)
        return result

    def reset_peak(self) -> None:
        self.peak, self.largest = self.live, 0

    def _register(self, storage: UntypedStorage, bytes_before: int) -> None:
        if id(storage) not in self._counted:  # torch keeps one Python object, hence one id, per living storage
            self._counted[id(storage)] = 0
            self._ours_from[id(storage)] = bytes_before
            weakref.finalize(storage, self._release, id(storage)).atexit = False

    def _count(self, storage: UntypedStorage) -> None:
        counted = storage.nbytes() - self._ours_from[id(storage)]
        self.live += counted - self._counted[id(storage)]
        self.largest = max(self.largest, counted)
        self._counted[id(storage)] = counted

    def _release(self, key: int) -> None:
        self.live -= self._counted.pop(key)
        del self._ours_from[key]


def _storages(tree: Any) -> list[UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
