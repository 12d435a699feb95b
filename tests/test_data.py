"""The question streams: repeatable, held-out questions never trained on, mistakes named."""

import sys
from itertools import pairwise
from typing import Any

import pytest

from flathead.data import TaskData

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def make(task: str = "chain_sum", task_config: dict[str, Any] | None = None, **options: Any) -> TaskData:
    settings = {"instruction": "Reply with the number only.", "val_size": 64, "seed": 0, **options}
    return TaskData(task, ONE_DIGIT if task_config is None else task_config, **settings)


def test_held_out_questions_are_distinct_and_never_trained_on() -> None:
    data = make()
    held_out = {question.text for question in data.held_out}
    assert len(held_out) == len(data.held_out) == 64
    trained = [
        data.train(index).text for index in range(1500)
    ]  # of 200 different ones: each held-out one would turn up
    assert not held_out.intersection(trained)
    assert len(set(trained)) == 200 - 64


def test_a_question_follows_from_seed_and_index_alone() -> None:
    one, other = make(), make()
    order = [1203, 0, 499, 500, 7, 0]
    assert [one.train(i) for i in order] == [other.train(i) for i in reversed(order)][::-1]
    assert one.held_out == other.held_out
    changed = make(seed=1)
    assert [q.text for q in changed.held_out] != [q.text for q in one.held_out]
    assert [changed.train(i).text for i in range(20)] != [one.train(i).text for i in range(20)]
    assert one.train(499).index == 499


def test_skipping_a_held_out_question_repeats_no_neighbour() -> None:
    """With 9000 questions and 4500 held out, serving the next index instead would give every other question twice."""
    data = make(task_config={**ONE_DIGIT, "min_digits": 2, "max_digits": 2}, val_size=4500)
    texts = [data.train(index).text for index in range(200)]
    assert sum(a == b for a, b in pairwise(texts)) <= 2


def test_text_and_score() -> None:
    data = make(instruction="Just the number!")
    question = data.train(3)
    assert question.text == question.entry["question"] + "\nJust the number!"
    assert data.score(question, question.entry["answer"] + ".") == 1.0
    assert data.score(question, "<answer>1000</answer>") < 0.5


# One task of each way of making questions: drawn lists of generators, data files, graphs, objects in the entry.
@pytest.mark.parametrize("task", ["gsm_symbolic", "word_ladder", "list_functions", "spell_backward", "maze"])
def test_other_tasks_work_alike(task: str) -> None:
    one, other = (make(task, {}, val_size=3) for _ in range(2))
    for index in (0, 501):
        question = one.train(index)
        assert question.text == other.train(index).text
        assert one.score(question, f"<answer>{question.entry['answer']}</answer>") == 1.0


def test_too_few_questions() -> None:
    with pytest.raises(ValueError, match=r"data.val_size: expected at most about 200, .* got 201; lower it, or widen"):
        make(val_size=201)
    data = make(val_size=200)
    with pytest.raises(ValueError, match=r"made only held-out questions .* lower data.val_size \(now 200\)"):
        data.train(0)


@pytest.mark.parametrize(
    ("task", "task_config", "message"),
    [
        ("chain_sums", {}, r"data\.task: .*GALLERY.*got 'chain_sums'; did you mean chain_sum"),
        ("qqqq", {}, r"data\.task: expected a reasoning-gym task \(http.*\), got 'qqqq'$"),
        (
            "chain_sum",
            {"max_term": 3},
            r"data\.task_config\.max_term: expected a parameter of chain_sum \(min_terms, max",
        ),
        ("chain_sum", {"size": 3}, r"data\.task_config\.size: expected to be left out"),
        ("chain_sum", {"seed": 3}, r"data\.task_config\.seed: expected to be left out.*set data\.seed"),
        ("chain_sum", {"min_terms": 9}, r"data\.task_config: chain_sum refuses {'min_terms': 9}: max_terms must be"),
        ("chain_sum", {"min_terms": "two"}, r"data\.task_config: chain_sum refuses {'min_terms': 'two'}: "),
        ("composite", {}, r"data\.task_config: composite refuses {}: Must specify at least one dataset"),
    ],
)
def test_mistakes_are_named(task: str, task_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(task, task_config)


def test_no_held_out_questions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.val_size: expected at least 1, got 0"):
        make(val_size=0)


def test_without_reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ModuleNotFoundError, match=r'is not installed; pip install "flathead\[train\]"') as caught:
        make()
    assert caught.value.name and caught.value.name.startswith("reasoning_gym")
