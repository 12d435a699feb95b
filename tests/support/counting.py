"""What a piece of code did, counted at the dispatcher: GEMM work, wide operations, and what autograd saved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WideOperations(TorchDispatchMode):
    """``names``: the operations that read or wrote a tensor of at least ``numel`` elements, in order."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        if any(isinstance(leaf, Tensor) and leaf.numel() >= self.numel for leaf in leaves):
            self.names.append(str(func))
        return result


def wide_operations(numel: int, run: Callable[[], Any]) -> list[str]:
    with WideOperations(numel) as seen:
        run()
    return seen.names


class MatrixProducts(TorchDispatchMode):
    """``flops`` of every matrix product, in-place and out= forms included (FlopCounterMode skips the former)."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name  # type: ignore[attr-defined]  # an OpOverload
        if name in ("aten::mm", "aten::bmm"):
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        elif name in ("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_"):
            self.flops += 2 * args[1].numel() * args[2].shape[-1]
        return func(*args, **(kwargs or {}))


def gemm_flops(run: Callable[[], Any]) -> int:
    with MatrixProducts() as products:
        run()
    return products.flops


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Collects every tensor that autograd saves for a backward pass inside the block."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def saved_bytes_beyond(saved: list[Tensor], *inputs: Tensor) -> int:
    """Bytes of the distinct saved storages that no input owns."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    extra = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in saved
        if tensor.untyped_storage().nbytes() and tensor.untyped_storage().data_ptr() not in owned
    }
    return sum(extra.values())
