"""The packed token batch: whole sequences laid end to end, without padding, labels already shifted.

    tokens        p p p r r | p r r r          p: prompt, r: response
    position_ids  0 1 2 3 4 | 0 1 2 3
    labels        p p r r _ | r r r _          _: -100, the last token of a sequence has nothing to predict
    response_mask . . * * . | * * * .          *: the label is a response token: this entry has statistics and a loss

Every per-token tensor has N entries, N being the tokens of all sequences; entry t speaks of the token after t.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """B sequences of N tokens in all; sequence b is `[cu_seqlens[b], cu_seqlens[b + 1])` of every tensor.

    weight_N is the loss weight of an entry: the whole loss is sum(weight_N * loss_N) over all micro-batches and all
    data-parallel ranks. With 1 / (response tokens of all ranks) it is the token mean, whatever the micro-batch size.
    """

    input_ids_N: Tensor  # int64
    position_ids_N: Tensor  # int64, from 0 in each sequence
    labels_N: Tensor  # int64
    response_mask_N: Tensor  # bool
    cu_seqlens: tuple[int, ...]  # B + 1
    weight_N: Tensor  # fp32, 0 outside the response
    advantages_N: Tensor | None = None  # fp32
    old_log_prob_N: Tensor | None = None  # fp32
    ref_log_prob_N: Tensor | None = None  # fp32
    temperature_N: Tensor | None = None  # fp32; where sequences were sampled at different temperatures

    def __post_init__(self) -> None:
        ends = self.cu_seqlens
        if len(ends) < 2 or ends[0] != 0 or any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"cu_seqlens: expected 0 < end of sequence 1 < end of sequence 2 ..., got {ends}")
        for name, tensor in self._tensors().items():
            if tensor.shape != (ends[-1],):
                raise ValueError(f"{name}: expected shape ({ends[-1]},) as cu_seqlens says, got {tuple(tensor.shape)}")

    @classmethod
    def from_sequences(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> "PackedBatch":
        """Token ids of B prompts and their responses -> one batch; the loss weight is the mean over its own tokens.

        Errors: ValueError without sequences, for unequal counts, and for an empty prompt (whose first response token
        would have no token to be predicted from). A response may be empty: it has no entries.
        """
        if not prompts or len(prompts) != len(responses):
            raise ValueError(
                f"from_sequences: expected as many responses as prompts, and at least one, got {len(prompts)} prompts "
                f"and {len(responses)} responses"
            )
        empty = [index for index, prompt in enumerate(prompts) if not prompt]
        if empty:
            raise ValueError(f"prompts[{empty[0]}]: expected at least one token, got none; begin it with a BOS token")
        whole = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        labels, mask = [], []
        for prompt, tokens in zip(prompts, whole, strict=True):
            labels += [*tokens[1:], IGNORED]
            mask += [False] * (len(prompt) - 1) + [True] * (len(tokens) - len(prompt)) + [False]
        response_mask_N = torch.tensor(mask)
        return cls(
            input_ids_N=torch.tensor([token for tokens in whole for token in tokens]),
            position_ids_N=torch.cat([torch.arange(len(tokens)) for tokens in whole]),
            labels_N=torch.tensor(labels),
            response_mask_N=response_mask_N,
            cu_seqlens=(0, *accumulate(map(len, whole))),
            weight_N=response_mask_N / response_mask_N.sum().clamp(min=1),
        )

    @property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.cu_seqlens)]

    def rows_of(self, sequences: Sequence[int]) -> Tensor:
        """Where in the N entries those sequences are, in the order given."""
        return torch.cat([torch.arange(*self.cu_seqlens[b : b + 2]) for b in sequences])

    def select(self, sequences: Sequence[int]) -> "PackedBatch":
        """The batch of only those sequences, in the order given."""
        rows = self.rows_of(sequences).to(self.input_ids_N.device)
        ends = (0, *accumulate(self.lengths[b] for b in sequences))
        return self._with({name: tensor[rows] for name, tensor in self._tensors().items()}, cu_seqlens=ends)

    def select_rows(self, rows: Tensor) -> "PackedBatch":
        """The batch of only those of the N entries, in ascending order: what one context-parallel rank has of it."""
        held = torch.zeros(self.cu_seqlens[-1], dtype=torch.long).index_fill_(0, rows.cpu(), 1)
        counts = [int(held[start:stop].sum()) for start, stop in pairwise(self.cu_seqlens)]
        ends = (0, *accumulate(count for count in counts if count))
        rows = rows.to(self.input_ids_N.device)
        return self._with({name: tensor[rows] for name, tensor in self._tensors().items()}, cu_seqlens=ends)

    def partition(self, max_tokens: int, at_least: int = 1) -> list[list[int]]:
        """Sequences in parts of at most `max_tokens` tokens, about equally many; few parts, but at least `at_least`.

        With fewer sequences than `at_least` there are as many parts as sequences.
        Errors: ValueError for a sequence that is longer than max_tokens.
        """
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        if self.lengths[longest] > max_tokens:
            raise ValueError(
                f"max_tokens {max_tokens} is less than the {self.lengths[longest]} tokens of sequence {longest}; "
                "raise it to at least that, or shorten prompts or responses"
            )
        count = min(max(math.ceil(self.cu_seqlens[-1] / max_tokens), at_least), len(self.lengths))
        while (parts := self._balanced(count, max_tokens)) is None:
            count += 1
        return parts

    def _balanced(self, count: int, max_tokens: int) -> list[list[int]] | None:
        """Longest first into the emptiest of `count` parts; None when one would be too large."""
        emptiest = [(0, part) for part in range(count)]
        parts: list[list[int]] = [[] for _ in range(count)]
        for b in sorted(range(len(self.lengths)), key=lambda b: -self.lengths[b]):
            tokens, part = heapq.heappop(emptiest)
            if tokens + self.lengths[b] > max_tokens:
                return None
            parts[part].append(b)
            heapq.heappush(emptiest, (tokens + self.lengths[b], part))
        return [sorted(part) for part in parts]

    def split(self, max_tokens: int, at_least: int = 1) -> list["PackedBatch"]:
        """Micro-batches of whole sequences; see `partition`."""
        return [self.select(part) for part in self.partition(max_tokens, at_least)]

    def unpack(self, values_N: Tensor) -> list[Tensor]:
        """Per sequence the values at its response entries, one for each response token."""
        return [values_N[start:stop][self.response_mask_N[start:stop]] for start, stop in pairwise(self.cu_seqlens)]

    def replace(self, **changes: Tensor) -> "PackedBatch":
        return self._with(changes)

    def counting_nothing(self) -> "PackedBatch":
        """The same tokens, none of which has statistics or a loss."""
        return self.replace(
            response_mask_N=torch.zeros_like(self.response_mask_N), weight_N=torch.zeros_like(self.weight_N)
        )

    def to(self, device: torch.device | str) -> "PackedBatch":
        return self._with({name: tensor.to(device) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cu_seqlens"}
        return {name: value for name, value in values.items() if value is not None}

    def _with(self, tensors: dict[str, Tensor], cu_seqlens: tuple[int, ...] | None = None) -> "PackedBatch":
        return PackedBatch(**{**self._tensors(), **tensors, "cu_seqlens": cu_seqlens or self.cu_seqlens})
