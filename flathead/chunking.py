"""How much is computed at a time: rows of a chunk, tiles of the head's product, and the byte budget behind both."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

MIB = 2**20
_CACHED_ELEMENTS = 2**20  # fp32 elements of a chunk that still profit from the last-level cache of a CPU
_FEWEST_ELEMENTS = 2**15  # below this the calls themselves cost more than the arithmetic


def default_budget(device: torch.device) -> int:
    """Bytes of workspace: 32 MiB on a CPU; on an accelerator 1/256 of its memory, between 64 and 512 MiB."""
    if device.type == "cpu" or device.type == "meta":
        return 32 * MIB
    total = torch.get_device_module(device).get_device_properties(device).total_memory
    return min(max(total // 256, 64 * MIB), 512 * MIB)


def rows_per_chunk(logits: Tensor, chunk_size: int | None, budget: int | None) -> int:
    """Rows of logits (..., V) reduced at a time: `chunk_size` if given, else what the budget allows.

    A chunk needs two fp32 copies of its rows. Without an explicit budget they stay under 1/32 of the logits' own bytes,
    so that the whole call adds at most the gradient and 5 %.
    """
    if chunk_size is not None:
        return chunk_size
    width = max(logits.shape[-1], 1)
    elements = (default_budget(logits.device) if budget is None else budget) // (2 * max(4, logits.itemsize))
    if logits.device.type == "cpu":
        elements = min(elements, _CACHED_ELEMENTS)
    if budget is None:
        elements = min(elements, max(logits.numel() * logits.itemsize // 256, _FEWEST_ELEMENTS))
    return max(1, elements // width)


class Tiles(NamedTuple):
    """The head's matrix product is made in tiles of `tokens x columns`; `rows` of a tile are reduced at a time."""

    tokens: int
    columns: int
    rows: int


def head_tiles(
    tokens: int, columns: int, weight: Tensor, dtype: torch.dtype, chunk_size: int | None, budget: int | None
) -> Tiles:
    """Tiles for `tokens` rows against `columns` rows of the head weight (V_local, H), within `budget` bytes.

    A tile keeps its logits (overwritten by their gradient), one product with the weight tile, the weight tile cast to
    the computing dtype, its gradient in that dtype and in fp32, and two fp32 copies of `rows` rows. The token tile is
    as large as the budget allows: every weight-gradient tile is then finished, and written, once.
    """
    itemsize, width = dtype.itemsize, max(weight.shape[-1], 1)
    budget = default_budget(weight.device) if budget is None else budget
    elements = max(budget // 64, 2**12)
    rest = max(budget - 8 * elements, budget // 2)
    per_column = width * (4 + 2 * itemsize)  # of the weight tile: fp32 gradient, cast, product
    tile_columns = min(columns, max(16, min(1024, rest // 4 // per_column)))
    tile_tokens = chunk_size or (rest - tile_columns * per_column) // ((tile_columns + width) * itemsize)
    tile_tokens = min(max(tile_tokens, 1), max(tokens, 1))
    if chunk_size is None:  # equal tiles rather than a ragged last one
        tile_tokens = math.ceil(tokens / math.ceil(tokens / tile_tokens)) if tokens else 1
    spare = (rest - tile_tokens * width * itemsize) // (tile_tokens * itemsize + per_column)
    tile_columns = min(columns, max(tile_columns, min(spare, 8192) // 64 * 64))
    return Tiles(tile_tokens, max(tile_columns, 1), max(1, elements // max(tile_columns, 1)))


def row_chunks(shape: tuple[int, ...], rows: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut rows of leading shape `shape` (at least 1-D) into pieces of at most `rows`."""
    if 0 in shape:
        return
    inner, dim = 1, len(shape) - 1
    while dim > 0 and inner * shape[dim] <= rows:
        inner, dim = inner * shape[dim], dim - 1
    step = max(1, rows // inner)
    for outer in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            yield (*outer, slice(start, min(start + step, shape[dim])))


class RowLayout:
    """Rows of a tensor (..., V) of any strides, seen as few dimensions as possible without a copy.

    Leading dimensions are sorted by stride and joined where memory allows: contiguous and transposed tensors
    become (N, V); a slice such as `logits[:, :-1]` stays (B, T, V). Per-row tensors are brought to the same order.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.lead = tensor.shape[:-1]
        strides = tensor.stride()[:-1]
        self.order = sorted(range(len(self.lead)), key=lambda dim: -strides[dim])
        joined: list[tuple[int, int]] = []
        for size, stride in ((self.lead[dim], strides[dim]) for dim in self.order if self.lead[dim] != 1):
            if joined and joined[-1][1] == stride * size:
                joined[-1] = (joined[-1][0] * size, stride)
            else:
                joined.append((size, stride))
        self.shape = tuple(size for size, _ in joined) or (1,)
        self.strides = tuple(stride for _, stride in joined) or (0,)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def view(self, tensor: Tensor) -> Tensor:
        """(*shape, V) of the tensor itself, without a copy."""
        return tensor.as_strided((*self.shape, tensor.shape[-1]), (*self.strides, tensor.stride(-1)))

    def per_row(self, values: Tensor) -> Tensor:
        """Values of the original leading shape -> (*shape), in this layout's order."""
        return values.permute(self.order).reshape(self.shape)

    def restore(self, values: Tensor) -> Tensor:
        """Values (*shape, ...) -> the original leading shape, without a copy."""
        trailing = values.shape[len(self.shape) :]
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        apart = values.reshape((*(self.lead[dim] for dim in self.order), *trailing))
        return apart.permute((*inverse, *range(len(inverse), apart.ndim)))
