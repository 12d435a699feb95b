"""Checkpoints are whole or not there; the newest ones stay; what is read is what was written."""

from pathlib import Path

import pytest
import torch

from flathead import checkpoint
from flathead.batch import PackedBatch
from flathead.config import FSDPEngineConfig, OptimConfig
from flathead.engines.fsdp import FSDPEngine
from flathead.losses import policy_loss_fn
from tests.support.models import tiny


def engine(seed: int) -> FSDPEngine:
    return FSDPEngine(
        tiny("llama", seed=seed), FSDPEngineConfig(dtype="float32"), OptimConfig(lr=0.01, lr_warmup_steps=4)
    )


def step(trained: FSDPEngine) -> dict[str, float]:
    batch = PackedBatch.from_sequences([[3, 4], [5, 6, 7]], [[8, 9], [10, 2]])
    return trained.train_step(batch.replace(advantages_N=torch.linspace(-1, 1, 9)), policy_loss_fn())


def test_a_loaded_engine_goes_on_exactly(tmp_path: Path) -> None:
    first, second = engine(0), engine(1)
    step(first)
    checkpoint.save(tmp_path, 1, first, {"before": 0.25}, keep=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.load(found, second) == {"before": 0.25, "step": 1}
    for _ in range(2):
        assert step(first) == step(second)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    trained = engine(0)
    for number in (1, 2, 10):
        checkpoint.save(tmp_path, number, trained, {}, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000010"]
    found = checkpoint.latest(tmp_path)
    assert found is not None and checkpoint.read_state(found)["step"] == 10


def test_what_was_never_finished_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash at any moment of saving: before the rename there is only the older checkpoint."""
    trained = engine(0)
    checkpoint.save(tmp_path, 1, trained, {}, keep=2)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "replace_directory", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, trained, {}, keep=2)
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.name == "step_000001"
    checkpoint.save(tmp_path, 2, trained, {}, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000001", "step_000002"]


def test_replacing_a_directory_and_a_file(tmp_path: Path) -> None:
    final = tmp_path / "final"
    for text in ("old", "new"):
        made = tmp_path / "made"
        made.mkdir()
        (made / "weights").write_text(text)
        checkpoint.replace_directory(made, final)
        checkpoint.write_text(tmp_path / "result.json", text)
    assert (final / "weights").read_text() == (tmp_path / "result.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "result.json"]


def test_no_run_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "never") is None
