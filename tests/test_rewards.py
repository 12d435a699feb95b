"""Answers found in responses, and scores that are numbers in [0, 1] or an error."""

import math
from typing import Any

import pytest
from reasoning_gym.factory import create_dataset

from flathead.rewards import extract_answer, score


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("12", "12"),
        ("  12\n", "12"),
        ("12.", "12"),
        ("-1,234.50.", "-1,234.50"),
        ("+3.", "+3"),
        ("1.5", "1.5"),
        ("12..", "12.."),
        ("It is 12.", "It is 12."),
        ("no.", "no."),
        ("", ""),
        ("I think <answer> 7 </answer>, yes", "7"),
        ("<answer>1</answer> or rather <answer>two\nlines</answer>", "two\nlines"),
        ("<answer>8.</answer>", "8"),
        ("<answer></answer>", ""),
        ("<answer>9", "<answer>9"),
    ],
)
def test_extract_answer(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


class Fixed:
    def __init__(self, value: Any) -> None:
        self.value, self.seen = value, []

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        self.seen.append((answer, entry))
        return self.value


def test_score_passes_on_answer_and_entry() -> None:
    dataset = Fixed(1)
    assert score(dataset, {"answer": "7"}, "<answer>7</answer>") == 1.0
    assert dataset.seen == [("7", {"answer": "7"})]


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.01, 1.01])
def test_a_score_out_of_range_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match=r"score of Fixed: expected a number in \[0, 1\], got"):
        score(Fixed(value), {}, "x")


def test_reasoning_gym_judges() -> None:
    from reasoning_gym import create_dataset

    dataset = create_dataset("chain_sum", seed=1, size=1)
    entry = dataset[0]
    assert score(dataset, entry, entry["answer"]) == 1.0
    assert score(dataset, entry, f"So: <answer>{entry['answer']}.</answer>") == 1.0
    assert score(dataset, entry, str(int(entry["answer"]) + 1)) < 0.5
    assert score(dataset, entry, "no idea") < 0.5


def test_an_answer_the_task_cannot_parse_is_wrong() -> None:
    from reasoning_gym import create_dataset

    dataset = create_dataset("prime_factorization", seed=1, size=1)
    with pytest.raises(ValueError, match="invalid literal"):
        dataset.score_answer("no idea", dataset[0])
    assert score(dataset, dataset[0], "no idea") == 0.0
    assert score(dataset, dataset[0], dataset[0]["answer"]) == 1.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("7", 1.0),
        ("7.", 1.0),
        ("3 + 4 = 7", 1.0),
        ("The answer is 7.", 1.0),
        ("<answer>It is 7</answer> 8", 1.0),
        ("7 is not 8", 0.0),
        ("17", 0.0),  # 7 inside 17: no partial reward
        ("seven", 0.0),
        ("", 0.0),
    ],
)
def test_a_number_is_right_or_wrong_whatever_stands_before_it(response: str, reward: float) -> None:
    assert score(create_dataset("chain_sum"), {"answer": "7"}, response) == reward


def test_the_last_number_counts_only_where_the_answer_is_a_number() -> None:
    dataset = Fixed(0.5)
    assert score(dataset, {"answer": "x = 7"}, "y = 7") == 0.5
    assert dataset.seen[0][0] == "y = 7"
