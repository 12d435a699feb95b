"""Verifiable rewards: the answer in a response, and reasoning-gym's own judgement of it."""

import math
import re
from typing import Any, Protocol

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")
_NUMBER_AND_STOP = re.compile(r"[+-]?\d[\d,]*(\.\d+)?\.")


class Scorer(Protocol):
    """What `score` asks of a reasoning-gym dataset."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def extract_answer(response: str) -> str:
    """The text within the last <answer>...</answer>, else the whole response; stripped.

    The full stop after a bare number goes: "12." is 12 with good manners.
    """
    tagged = _ANSWER.findall(response)
    answer = (tagged[-1] if tagged else response).strip()
    return answer[:-1] if _NUMBER_AND_STOP.fullmatch(answer) else answer


def score(dataset: Scorer, entry: dict[str, Any], response: str) -> float:
    """reasoning-gym's score of the response's answer, in [0, 1].

    Errors: ValueError when the task's score is not a finite number in [0, 1].
    """
    try:
        reward = float(dataset.score_answer(extract_answer(response), entry))
    # Several tasks (prime_factorization, boxnet, game_of_life, coin_flip) parse answers without a guard and raise
    # one of these for an answer that is no number, no list, no board: a wrong answer, then.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return 0.0
    if not (math.isfinite(reward) and 0 <= reward <= 1):
        raise ValueError(
            f"score of {type(dataset).__name__}: expected a number in [0, 1], got {reward} for {response!r}"
        )
    return reward


def is_right(dataset: Scorer, entry: dict[str, Any], response: str) -> bool:
    """Whether the answer is right, in whatever form: it scores 1, or is a number and the last one in the response does.

    The reward also asks for the form ("Reply with the number only."); this measures what the model knows.
    """
    numbers = _NUMBER.findall(response) if _NUMBER.fullmatch(str(entry["answer"])) else []
    return any(score(dataset, entry, answer) == 1.0 for answer in (response, *numbers[-1:]))
