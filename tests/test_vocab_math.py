"""vocab_math: pieces of a row merge to the row in any grouping, and so does its gradient fall apart."""

import itertools
import math
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flathead import vocab_math
from flathead.vocab_math import Scaling
from tests.support.truth import STATS, reference

SCALINGS = [
    Scaling(),
    Scaling(beta=1 / 0.7),
    Scaling(beta=0.5, softcap=5.0, logit_scale=2.0),
    Scaling(beta=torch.tensor([0.4, 1.0, 2.5, 1.0, 3.0, 0.1], dtype=torch.float64)),
]


def truth_options(scaling: Scaling) -> dict[str, object]:
    beta = scaling.beta
    scale = {} if scaling.softcap is None else {"softcap": scaling.softcap, "logit_scale": scaling.logit_scale}
    return {"temperature": 1 / beta, **scale}


def rows_of(seed: int, width: int, dead: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(6, width, generator=generator, dtype=torch.float64)
    label = torch.randint(0, width, (6,), generator=generator)
    kill = torch.rand(6, width, generator=generator) < dead
    kill.scatter_(1, label[:, None], False)
    return logits.masked_fill(kill, -math.inf).to(dtype), label


def in_pieces(logits: Tensor, label: Tensor, cuts: list[int], scaling: Scaling) -> list[Tensor]:
    edges = [0, *sorted(cuts), logits.shape[-1]]
    return [
        vocab_math.partials(logits[:, start:stop], label - start, scaling, STATS)
        for start, stop in itertools.pairwise(edges)
    ]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["plain", "temperature", "softcap", "per row"])
@given(st.integers(0, 2**31), st.integers(1, 24), st.data())
def test_pieces_merge_to_the_row_in_any_grouping(scaling: Scaling, seed: int, width: int, data: st.DataObject) -> None:
    dead = 0.0 if scaling.softcap else data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    logits, label = rows_of(seed, width, dead, torch.float64)
    cuts = data.draw(st.lists(st.integers(0, width), max_size=5))  # equal cuts: pieces with no columns
    pieces = in_pieces(logits, label, cuts, scaling)

    def merge(a: Tensor, b: Tensor) -> Tensor:
        return vocab_math.merge(a, b, scaling.beta)

    leftwards = reduce(merge, pieces)
    rightwards = reduce(lambda a, b: merge(b, a), reversed(pieces))
    neutral = vocab_math.empty_partials((6,), torch.float64, logits.device)
    truth, _ = reference(logits, label, {}, dtype=torch.float64, **truth_options(scaling))
    for merged in (leftwards, rightwards, merge(neutral, leftwards), merge(leftwards, neutral)):
        values, ln_s = vocab_math.finish(merged, scaling.beta, STATS, width)
        for name in STATS:
            torch.testing.assert_close(values[name], truth[name], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ln_s, merged[1].log())


@pytest.mark.parametrize("scaling", SCALINGS, ids=["plain", "temperature", "softcap", "per row"])
@pytest.mark.parametrize("name", STATS)
@given(st.integers(0, 2**31), st.integers(1, 24), st.data())
def test_gradient_of_the_row_in_pieces(name: str, scaling: Scaling, seed: int, width: int, data: st.DataObject) -> None:
    dead = 0.0 if scaling.softcap else data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    logits, label = rows_of(seed, width, dead, torch.float64)
    upstream = {name: torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}
    whole = vocab_math.partials(logits, label, scaling, STATS)
    values, ln_s = vocab_math.finish(whole, scaling.beta, STATS, width)
    coefficients = vocab_math.row_coefficients(upstream, ln_s, values["entropy"], values["sum_pi_squared"])
    cuts = data.draw(st.lists(st.integers(0, width), max_size=3))
    edges = [0, *sorted(cuts), width]
    pieces = [
        vocab_math.row_gradient(logits[:, start:stop], label - start, whole[0], ln_s, coefficients, scaling)
        for start, stop in itertools.pairwise(edges)
    ]
    _, expected = reference(logits, label, upstream, dtype=torch.float64, **truth_options(scaling))
    torch.testing.assert_close(torch.cat(pieces, -1), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    logits, label = rows_of(0, 9, 0.3, dtype)
    whole = vocab_math.partials(logits, label, Scaling(), STATS)
    assert whole.dtype == torch.float32
    values, ln_s = vocab_math.finish(whole, 1.0, STATS, 9)
    truth, _ = reference(logits, label, {}, dtype=torch.float64)
    for name in STATS:
        torch.testing.assert_close(values[name].double(), truth[name], rtol=1e-6, atol=2e-6)
    coefficients = vocab_math.row_coefficients({"log_prob": torch.ones(6)}, ln_s, None, None)
    gradient = vocab_math.row_gradient(logits, label, whole[0], ln_s, coefficients, Scaling())
    assert gradient.dtype == torch.float32


def test_partials_not_asked_for_stay_neutral() -> None:
    logits, label = rows_of(0, 9, 0.0, torch.float32)
    neutral = vocab_math.empty_partials((6,), torch.float32, logits.device)
    for stats, left_out in ((("logsumexp",), (2, 3, 4)), (("entropy",), (3, 4)), (("log_prob", "entropy"), (3,))):
        whole = vocab_math.partials(logits, label, Scaling(), stats)
        for entry in left_out:
            assert torch.equal(whole[entry], neutral[entry])


def test_a_row_with_no_live_column() -> None:
    """It has no distribution: log_prob and logsumexp -inf, the others 0, no gradient; its neighbours keep theirs."""
    logits = torch.tensor([[-math.inf] * 4, [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    label = torch.tensor([1, 1])
    whole = vocab_math.partials(logits, label, Scaling(), STATS)
    values, ln_s = vocab_math.finish(whole, 1.0, STATS, 4)
    assert values["log_prob"][0] == values["logsumexp"][0] == -math.inf
    assert values["entropy"][0] == values["sum_pi_squared"][0] == 0
    truth, _ = reference(logits[1:], label[1:], {}, dtype=torch.float64)
    for name in STATS:
        torch.testing.assert_close(values[name][1:], truth[name])
    upstream = {name: torch.ones(2, dtype=torch.float64) for name in STATS[1:]}
    coefficients = vocab_math.row_coefficients(upstream, ln_s, values["entropy"], values["sum_pi_squared"])
    gradient = vocab_math.row_gradient(logits, label, whole[0], ln_s, coefficients, Scaling())
    assert not gradient[0].any() and gradient[1].any() and gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 10, 50_257, 151_936])
def test_published_limits_hold_exactly(vocab_size: int, dtype: torch.dtype) -> None:
    """0 <= entropy <= ln V and 1/V <= sum_pi_squared <= 1 as real numbers, for the flattest and the sharpest row."""
    logits = torch.zeros(2, vocab_size, dtype=dtype)
    logits[1, 0] = 90.0
    whole = vocab_math.partials(logits, torch.zeros(2, dtype=torch.int64), Scaling(), STATS)
    values, _ = vocab_math.finish(whole, 1.0, STATS, vocab_size)
    for row in range(2):
        assert 0 <= values["entropy"][row].item() <= math.log(vocab_size)
        assert 1 / vocab_size <= values["sum_pi_squared"][row].item() <= 1
        assert values["log_prob"][row].item() <= 0
