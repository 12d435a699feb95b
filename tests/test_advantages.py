"""Advantages against Python's own float64 statistics, group by group."""

import math
import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flathead.advantages import ADVANTAGES, grpo, rloo

# (reward, group) in any order, groups of any size
rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, -2.0]), st.sampled_from([-7, 0, 3, 10**12])),
    min_size=1,
    max_size=24,
)


def reference(name: str, pairs: list[tuple[float, int]]) -> list[float]:
    groups = defaultdict(list)
    for reward, group in pairs:
        groups[group].append(reward)

    def of(reward: float, group: int) -> float:
        rewards = groups[group]
        if len(set(rewards)) == 1:
            return 0.0
        if name == "rloo":
            return reward - (math.fsum(rewards) - reward) / (len(rewards) - 1)
        centered = reward - statistics.fmean(rewards)
        return centered / (statistics.stdev(rewards) + 1e-6) if name == "grpo" else centered

    return [of(*pair) for pair in pairs]


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@given(pairs=rows)
def test_against_plain_python(name: str, dtype: torch.dtype, tolerance: float, pairs: list[tuple[float, int]]) -> None:
    rewards_B = torch.tensor([reward for reward, _ in pairs], dtype=dtype)
    advantages_B = ADVANTAGES[name](rewards_B, torch.tensor([group for _, group in pairs]))
    assert advantages_B.dtype == dtype
    assert advantages_B.tolist() == pytest.approx(reference(name, pairs), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 9))
def test_a_group_that_teaches_nothing_gets_exactly_zero(name: str, reward: float, size: int) -> None:
    rewards_B = torch.tensor([*[reward] * size, 0.0, 1.0], dtype=torch.float64)
    advantages_B = ADVANTAGES[name](rewards_B, torch.tensor([*[4] * size, 5, 5]))
    assert not advantages_B[:size].any() and advantages_B[-1] > 0


def test_by_hand() -> None:
    rewards_B, group_B = torch.tensor([1, 0, 0, 3]), torch.tensor([0, 0, 0, 0])
    assert rloo(rewards_B, group_B).tolist() == pytest.approx([0, -4 / 3, -4 / 3, 8 / 3])
    assert grpo(rewards_B, group_B, norm_by_std=False).tolist() == [0, -1, -1, 2]
    assert grpo(rewards_B, group_B).tolist() == pytest.approx([0, -1 / 2**0.5, -1 / 2**0.5, 2**0.5], rel=1e-5)
    assert grpo(rewards_B, group_B, eps=1.0).tolist()[3] == pytest.approx(2 / (2**0.5 + 1))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_what_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"rewards_B\[1\]: expected a finite reward, got nan"):
        ADVANTAGES[name](torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="expected one shape"):
        ADVANTAGES[name](torch.tensor([1.0, 2.0]), torch.tensor([0]))
