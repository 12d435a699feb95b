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


def is_number(answer: object) -> bool:
    return _NUMBER.fullmatch(str(answer)) is not None


def extract_answer(response: str, number: bool = False) -> str:
    """The text within the last <answer>...</answer>, else the whole response; stripped.

    The full stop after a bare number goes: "12." is 12 with good manners. number: the last number in that text, if any.
    """
    tagged = _ANSWER.findall(response)
    answer = (tagged[-1] if tagged else response).strip()
    numbers = _NUMBER.findall(answer) if number else []
    if numbers:
        return numbers[-1]
    return answer[:-1] if _NUMBER_AND_STOP.fullmatch(answer) else answer


def score(dataset: Scorer, entry: dict[str, Any], response: str) -> float:
    """reasoning-gym's score of the response's answer, in [0, 1].

    Where the answer is a number, the last number of the response is taken, and it is right (1) or wrong (0): for a 1
    inside a 10 reasoning-gym would give half the reward, and a policy would learn to earn that.
    Errors: ValueError when the task's score is not a finite number in [0, 1].
    """
    number = is_number(entry.get("answer"))
    try:
        reward = float(dataset.score_answer(extract_answer(response, number), entry))
    # Several tasks (prime_factorization, boxnet, game_of_life, coin_flip) parse answers without a guard and raise
    # one of these for an answer that is no number, no list, no board: a wrong answer, then.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return 0.0
    if not (math.isfinite(reward) and 0 <= reward <= 1):
        raise ValueError(
            f"score of {type(dataset).__name__}: expected a number in [0, 1], got {reward} for {response!r}"
        )
    return float(reward == 1.0) if number else reward
