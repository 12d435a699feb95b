"""Which tokens of a packed batch a rank of the Megatron engine computes, and with what padding."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flathead.batch import PackedBatch
from flathead.engines.base import MicroStep


class Pack(NamedTuple):
    """Which tokens of a packed batch this rank computes, with what padding.

    source_L: for each local token its row of the batch, -1 for padding. ends: of the whole padded sequences.
    """

    source_L: Tensor
    ends: tuple[int, ...]

    @classmethod
    def of(cls, batch: PackedBatch, multiple: int, cp: int, cp_rank: int) -> "Pack":
        """Every sequence is padded to 2 cp pieces of equal length, and the local tokens to a multiple of `multiple`
        by a sequence of nothing but padding at the end."""
        unit = 2 * cp if cp > 1 else 1
        sources, ends = [], [0]
        for start, stop in pairwise(batch.cu_seqlens):
            padded = -(-(stop - start) // unit) * unit
            rows = torch.cat([torch.arange(start, stop), torch.full((padded - stop + start,), -1)])
            sources.append(rows[positions_of(padded, cp, cp_rank)])
            ends.append(ends[-1] + padded)
        missing = -sum(map(len, sources)) % multiple
        while missing % (unit // cp):  # the last sequence has whole pieces, too
            missing += multiple
        if missing:
            sources.append(torch.full((missing,), -1))
            ends.append(ends[-1] + missing * cp)
        return cls(torch.cat(sources), tuple(ends))

    @property
    def rows(self) -> Tensor:
        """The batch's rows this rank has, in the order of its tokens."""
        return self.source_L[self.source_L >= 0]

    def local(self, values_N: Tensor) -> Tensor:
        """(N) -> (L), 0 where padding is."""
        source = self.source_L.to(values_N.device)
        return values_N[source.clamp(min=0)] * (source >= 0)

    def kept(self, values_L: Tensor) -> Tensor:
        """(L, ...) -> the entries that are no padding; one that is when there is no other."""
        count = len(self.rows)
        if bool((self.source_L[:count] >= 0).all()):
            return values_L[: max(count, 1)]
        return values_L[(self.source_L >= 0).to(values_L.device)]

    def own(self, step: MicroStep) -> MicroStep:
        """The step of only this rank's rows."""
        if len(self.rows) == len(step.batch.input_ids_N):
            return step
        return step.of_rows(self.rows)


def positions_of(tokens: int, cp: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """Which of a sequence's `tokens` (a multiple of 2 cp) a context-parallel rank holds: the pieces `rank` and
    `2 cp - 1 - rank` of 2 cp, so that every rank has as much attention to compute (Megatron's layout)."""
    if cp == 1:
        return torch.arange(tokens, device=device)
    pieces = torch.arange(tokens, device=device).view(2 * cp, -1)
    return torch.cat([pieces[rank], pieces[2 * cp - 1 - rank]])
