"""Random inputs: hypothesis draws the shape of a case and a seed, torch draws the numbers."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.truth import STATS

LAYOUTS = ("contiguous", "transposed", "swapped", "sliced", "strided_last", "expanded", "offset")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def lay_out(values: Tensor, layout: str) -> Tensor:
    """The same values under other strides. "expanded" repeats the first row of the first dimension with stride 0."""
    if layout == "contiguous" or values.dim() == 0:
        return values.contiguous()
    if layout == "transposed":
        return values.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "swapped":  # the leading dimensions the other way round in memory
        order = [*range(values.dim() - 2, -1, -1), values.dim() - 1]
        return values.permute(order).contiguous().permute(order)
    if layout == "sliced":
        return torch.cat([values, torch.full_like(values[..., :1], 77.0)], dim=-1)[..., :-1]
    if layout == "strided_last":
        return torch.stack([values, torch.full_like(values, 77.0)], dim=-1).flatten(-2)[..., ::2]
    if layout == "offset":
        return torch.cat([torch.full((3,), 77.0, dtype=values.dtype), values.flatten()])[3:].view(values.shape)
    if layout == "expanded":
        return values[:1].expand(values.shape) if values.dim() > 1 else values
    raise ValueError(layout)


@dataclass
class Case:
    """Inputs of token_stats, its options, and the upstream gradients of the statistics that get one."""

    logits: Tensor
    labels: Tensor
    options: dict[str, Any]  # temperature, vocab_size, softcap, logit_scale: what the truth takes as well
    stats: tuple[str, ...]
    upstream: dict[str, Tensor]
    chunk_size: int | None
    notes: dict[str, Any] = field(default_factory=dict)


def leading_shapes(max_rows: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    side = st.integers(1, max_rows)
    return st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 20)),
        st.tuples(side, side),
        st.tuples(side, st.integers(0, 3), side),
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    )


def temperatures(shape: tuple[int, ...], generator: torch.Generator) -> st.SearchStrategy[float | Tensor]:
    def tensor(of: tuple[int, ...]) -> Tensor:
        return 0.3 + 2.0 * torch.rand(of, generator=generator)

    choices: list[st.SearchStrategy[Any]] = [
        st.sampled_from([1, 1.0, 0.25, 0.7, 3.0]),
        st.builds(lambda: tensor(())),
        st.builds(lambda: tensor(shape)),
    ]
    if shape:  # one per sequence: broadcast over the last dimension
        choices.append(st.builds(lambda: tensor((*shape[:-1], 1))))
    return st.one_of(choices)


def _dead_columns(logits: Tensor, pattern: str, labels: Tensor, generator: torch.Generator) -> Tensor:
    """-inf where the pattern says; the label's column stays alive."""
    width = logits.shape[-1]
    if pattern == "columns":
        dead = (torch.rand(width, generator=generator) < 0.5).expand(logits.shape)
    elif pattern == "entries":
        dead = torch.rand(logits.shape, generator=generator) < 0.5
    elif pattern == "all but the label":
        dead = torch.ones(logits.shape, dtype=torch.bool)
    else:
        return logits
    alive = torch.nn.functional.one_hot(labels.clamp(min=0), width).bool()
    return logits.masked_fill(dead & ~alive, -math.inf)


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    shape = draw(leading_shapes())
    width = draw(st.sampled_from([1, 2, 3, 7, 16, 33, 130]))
    dtype = draw(st.sampled_from(dtypes))
    layout = draw(st.sampled_from(LAYOUTS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    vocab_size = draw(st.sampled_from([None, width, max(1, width - draw(st.integers(1, 5)))]))
    real = vocab_size or width
    labels = torch.randint(0, real, shape, generator=generator)
    ignored = draw(st.sampled_from([0.0, 0.3, 1.0]))
    softcap = draw(st.sampled_from([None, None, 5.0, 30.0]))
    pattern = draw(st.sampled_from(["none", "none", "columns", "entries", "all but the label"]))
    if layout == "expanded" and shape:  # its rows are one row: so must the pattern's live columns be
        labels = labels[:1].expand(labels.shape).contiguous()
    logits = draw(st.sampled_from([0.1, 3.0, 40.0])) * torch.randn((*shape, width), generator=generator)
    offset = draw(st.sampled_from([0.0, 0.0, 1e4] if dtype == torch.float16 else [0.0, 0.0, -1e4, 1e8]))
    if softcap is None:  # a cap gives dead columns a finite score, and swallows an offset
        logits = _dead_columns(logits + offset, pattern, labels, generator)
    logits = logits.to(dtype)
    logits[..., real:] = draw(st.sampled_from([0.0, 1e4, math.nan, math.inf]))  # padding: any bits at all
    temperature = draw(temperatures(shape, generator))
    labels = labels.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)
    stats = tuple(draw(st.permutations(STATS))[: draw(st.integers(1, len(STATS)))])
    used = draw(st.lists(st.sampled_from(stats), unique=True, min_size=1))
    weights = {name: torch.randn(shape, generator=generator) for name in used}
    if shape and draw(st.booleans()):  # rows that get exactly nothing
        weights = {name: weight * (torch.arange(shape[-1]) % 2) for name, weight in weights.items()}
    options: dict[str, Any] = {"temperature": temperature, "vocab_size": vocab_size, "softcap": softcap}
    options["logit_scale"] = draw(st.sampled_from([1.0, 0.0625, 2.0]))
    chunk_size = draw(st.sampled_from([None, 1, 2, 5, 8, 1000]))
    return Case(lay_out(logits, layout), labels, options, stats, weights, chunk_size, {"layout": layout})
