"""Questions from reasoning-gym: an endless training stream and held-out questions it never contains.

Question `index` of a stream is a function of (seed, index) alone: any process, and a resumed run, gets the same ones.
"""

from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from random import Random
from typing import Any

from flathead import rewards

# Datasets are made in pieces of this many questions: reasoning-gym's own default size, valid for each of its tasks.
# With a larger one some fail, or first draw that many numbers.
_PIECE = 500
_TASK_LIST = "https://github.com/open-thought/reasoning-gym/blob/main/GALLERY.md"


@dataclass(frozen=True)
class Question:
    """text: what the model is asked. entry: reasoning-gym's, with the answer. index: its place in its stream."""

    text: str
    entry: dict[str, Any]
    index: int


class TaskData:
    """A reasoning-gym task with its parameters; `instruction` ends every question.

    held_out: `val_size` questions, no two alike. Errors: ValueError for a task that does not exist, parameters it does
    not take, val_size below 1, and a task with too few different questions; ModuleNotFoundError without reasoning-gym.
    """

    def __init__(self, task: str, task_config: dict[str, Any], *, instruction: str, val_size: int, seed: int) -> None:
        if val_size < 1:
            raise ValueError(f"data.val_size: expected at least 1, got {val_size}")
        self.task, self.task_config, self.instruction, self.seed = task, dict(task_config), instruction, seed
        _check_parameters(task, self.task_config)
        self._piece = lru_cache(maxsize=4)(self._make_piece)
        self.held_out: list[Question] = []
        texts: set[str] = set()
        drawn, newest = 0, 0
        while len(texts) < val_size and drawn - newest < 4 * _PIECE:
            question = self._question("held-out", drawn // _PIECE, drawn % _PIECE, len(self.held_out))
            drawn += 1
            if question.text not in texts:
                texts.add(question.text)
                self.held_out.append(question)
                newest = drawn
        if len(texts) < val_size:
            raise ValueError(
                f"data.val_size: expected at most about {len(texts)}, the different questions that {task} makes with "
                f"{self.task_config}, got {val_size}; lower it, or widen data.task_config"
            )
        self._held_out_texts = frozenset(texts)
        self._scorer = self._piece("held-out", 0)

    def train(self, index: int) -> Question:
        """Training question `index`. Errors: ValueError when the task makes nothing but held-out questions."""
        question = self._question("train", index // _PIECE, index % _PIECE, index)
        for position in range(_PIECE):
            if question.text not in self._held_out_texts:
                return question
            # its own stream: going on to the next index would serve that question twice
            question = self._question("instead", index, position, index)
        raise ValueError(
            f"data.task: {self.task} with {self.task_config} made only held-out questions in {_PIECE} tries; lower "
            f"data.val_size (now {len(self.held_out)}), or widen data.task_config"
        )

    def score(self, question: Question, response_text: str) -> float:
        """The reward of a response, in [0, 1]."""
        return rewards.score(self._scorer, question.entry, response_text)

    def _question(self, stream: str, piece: int, position: int, index: int) -> Question:
        entry = self._piece(stream, piece)[position]
        return Question(f"{entry['question']}\n{self.instruction}", entry, index)

    def _make_piece(self, stream: str, number: int) -> Any:
        # Neighbouring seeds would not do: reasoning-gym draws question i of seed s from s + i.
        seed = Random(f"{self.seed} {stream} {number}").getrandbits(31)
        return _create(self.task, {**self.task_config, "seed": seed, "size": _PIECE})


def _check_parameters(task: str, task_config: dict[str, Any]) -> None:
    _, datasets = _reasoning_gym()
    if task not in datasets:
        near = get_close_matches(task, datasets, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"data.task: expected a reasoning-gym task ({_TASK_LIST}), got {task!r}{hint}")
    known = [field.name for field in fields(datasets[task][1]) if field.name not in ("seed", "size")]
    for key in task_config:
        if key in ("seed", "size"):
            raise ValueError(f"data.task_config.{key}: expected to be left out, got {task_config[key]}; set data.seed")
        if key not in known:
            raise ValueError(f"data.task_config.{key}: expected a parameter of {task} ({', '.join(known)})")


def _create(task: str, parameters: dict[str, Any]) -> Any:
    create_dataset, _ = _reasoning_gym()
    try:
        return create_dataset(task, **parameters)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:  # how the tasks refuse a value
        given = {key: value for key, value in parameters.items() if key not in ("seed", "size")}
        raise ValueError(f"data.task_config: {task} refuses {given}: {error}") from error


def _reasoning_gym() -> tuple[Any, dict[str, Any]]:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(f'{package} is not installed; pip install "flathead[train]"', name=package) from error
    return create_dataset, DATASETS
