"""Whole training jobs: they learn, they leave what they promise, and no interruption changes what they compute."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from flathead import checkpoint
from flathead.cli import main
from flathead.data import Question, TaskData
from tests.support.jobs import command, curve, records, start, tiny_chat_model, torchrun

STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert main(command(model, run_dir, f"trainer.steps={STEPS}")) == 0
    return run_dir


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "final" / "model.safetensors")


def assert_same_run(run_dir: Path, other: Path) -> None:
    assert curve(run_dir) == curve(other)
    ours, theirs = weights(run_dir), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (run_dir / "result.json").read_text() == (other / "result.json").read_text()


def wait_for_steps(process: "subprocess.Popen[str]", run_dir: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(records(run_dir)) < steps:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def test_learns(model: Path, tmp_path: Path) -> None:
    plain = ("actor.ppo_epochs=1", "actor.ppo_mini_batch_size=4", "actor.entropy_coeff=0")
    size = ("rollout.n=16", "data.max_response_length=1", "trainer.steps=10", "trainer.save_freq=100")
    faster = ("actor.optim.lr=1e-2", "actor.optim.lr_warmup_steps=0")
    no_kl = [word for word in command(model, tmp_path / "run", *size, *plain, *faster) if "kl_loss" not in word]
    assert main([*no_kl, "actor.use_kl_loss=false"]) == 0
    rewards = [record["reward"] for record in records(tmp_path / "run")]
    assert len(rewards) == 10 and sum(rewards[-4:]) > 3 * sum(rewards[:4]) > 0
    for record in records(tmp_path / "run"):
        assert record["ratio"] == pytest.approx(1) and "kl" not in record  # on policy, without a reference


def test_leaves_what_it_promises(model: Path, whole: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert [record["step"] for record in records(whole)] == list(range(1, STEPS + 1))
    shown = {"reward", "entropy", "kl", "response_length", "tokens_per_second", "peak_memory_gb", "grad_norm", "lr"}
    assert all(shown <= record.keys() for record in records(whole))
    assert [record["lr"] for record in records(whole)][-1] == 5e-3
    assert list((whole / "tensorboard").glob("events.*")) and (whole / "report.png").stat().st_size > 10_000
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step_000004", "step_000006"]
    result = json.loads((whole / "result.json").read_text())
    assert result["steps"] == STEPS and 0 <= result["before"] <= 1 and 0 <= result["after"] <= 1
    trained = AutoModelForCausalLM.from_pretrained(whole / "final")
    first = AutoModelForCausalLM.from_pretrained(model)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), first.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(whole / "final")("12")["input_ids"] == [4, 5]


def test_further_steps_on_a_batch_are_off_policy(whole: Path) -> None:
    """Two epochs of two mini-batches: all but the first step are taken against the old log-probabilities."""
    assert all(abs(record["ratio"] - 1) > 1e-4 and record["ppo_kl"] != 0 for record in records(whole))


def test_every_step_asks_new_questions(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stock = TaskData.train

    def train(self: TaskData, index: int) -> Question:
        asked.append(index)
        return stock(self, index)

    monkeypatch.setattr(TaskData, "train", train)
    for steps in (1, 3):
        assert main(command(model, tmp_path / "run", f"trainer.steps={steps}")) == 0
    assert asked == [*range(4), *range(4), *range(12), *range(4, 12)]  # checked, then trained on; and the rest


def test_the_last_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(model, tmp_path / "run", "trainer.steps=1")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"held-out accuracy: before [01]\.\d{3} after [01]\.\d{3}", last)
    before = records(tmp_path / "run")
    assert main(command(model, tmp_path / "run", "trainer.steps=1")) == 0  # done already: the same answer, no work
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert records(tmp_path / "run") == before


@pytest.mark.parametrize("first", [1, 3])
def test_a_longer_run_goes_on_exactly(model: Path, whole: Path, tmp_path: Path, first: int) -> None:
    assert main(command(model, tmp_path / "run", f"trainer.steps={first}")) == 0
    assert main(command(model, tmp_path / "run", f"trainer.steps={STEPS}")) == 0
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_loses_nothing(model: Path, whole: Path, tmp_path: Path, number: signal.Signals) -> None:
    arguments = command(model, tmp_path / "run", f"trainer.steps={STEPS}", "trainer.save_freq=100")
    process = start(arguments)
    wait_for_steps(process, tmp_path / "run", 1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output
    done = len(records(tmp_path / "run"))
    assert f"{done} of {STEPS} steps are saved, the same command goes on from there" in output
    assert done < STEPS and not (tmp_path / "run" / "final").exists()
    again = start(arguments)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and f"{done} of {STEPS} steps are done" in output
    assert_same_run(tmp_path / "run", whole)


def test_kill_resumes_from_the_last_whole_checkpoint(model: Path, whole: Path, tmp_path: Path) -> None:
    arguments = command(model, tmp_path / "run", f"trainer.steps={STEPS}")
    process = start(arguments)
    wait_for_steps(process, tmp_path / "run", 3)
    process.kill()
    process.communicate()
    assert checkpoint.latest(tmp_path / "run") is not None
    torn = tmp_path / "run" / "checkpoints" / ".step_000006.partial"  # as a kill in the middle of saving leaves it
    torn.mkdir(exist_ok=True)
    (torn / "__0_0.distcp").write_bytes(b"half")
    assert main(arguments) == 0
    assert_same_run(tmp_path / "run", whole)


def test_other_settings_do_not_go_on(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(model, tmp_path / "run", "trainer.steps=1")) == 0
    for changed in ("actor.optim.lr=1e-3", "trainer.resume=never"):
        assert main(command(model, tmp_path / "run", "trainer.steps=2", changed)) == 2
        error = capsys.readouterr().err
        assert changed.split("=")[0].split(".")[-1] in error and "choose another trainer.run_dir" in error


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_two_processes_give_the_curve_of_one(model: Path, tmp_path: Path, tp: int) -> None:
    """In fp32 the samples are the same, so that the numbers differ by rounding alone."""
    exact = ("actor.fsdp_config.dtype=float32", "rollout.dtype=float32", "trainer.steps=3")
    assert main(command(model, tmp_path / "one", *exact)) == 0
    layout = f"actor.fsdp_config.tensor_parallel_size={tp}"
    process = start(command(model, tmp_path / "two", *exact, layout), launcher=torchrun(2))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    for one, two in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=2e-3, abs=2e-5)
    closing = [line for line in output.splitlines() if line.startswith("held-out accuracy: before")]
    assert len(closing) == 1


@pytest.mark.slow
def test_a_run_may_go_on_with_another_number_of_processes(model: Path, tmp_path: Path) -> None:
    exact = ("actor.fsdp_config.dtype=float32", "rollout.dtype=float32")
    assert main(command(model, tmp_path / "one", *exact, "trainer.steps=3")) == 0
    assert main(command(model, tmp_path / "two", *exact, "trainer.steps=2")) == 0
    process = start(command(model, tmp_path / "two", *exact, "trainer.steps=3"), launcher=torchrun(2))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert curve(tmp_path / "two")[-1] == pytest.approx(curve(tmp_path / "one")[-1], rel=2e-3, abs=2e-5)


def test_ctrl_c_while_the_model_loads_ends_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to save yet, so Python's own handler is in place."""

    def load(path: str) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal was put off")

    monkeypatch.setattr("flathead.trainer.load_model", load)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in the background
    try:
        assert main(command(model, tmp_path / "run")) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{not: [yaml", "trainer: 3\n", "[]\n"])
def test_lost_or_damaged_settings_of_a_run_are_named(
    content: str | None, model: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    settings = tmp_path / "run" / "config.yaml"
    settings.unlink() if content is None else settings.write_text(content)
    assert main(command(model, tmp_path / "run", f"trainer.steps={STEPS + 2}")) == 2
    error = capsys.readouterr().err
    assert f"flathead: {settings}: expected the settings of the run" in error and error.count("\n") == 1


def test_a_damaged_result_is_named(
    model: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text('{"steps": 6')
    assert main(command(model, tmp_path / "run", f"trainer.steps={STEPS}")) == 2
    assert "result.json: expected numbers named steps, before and after" in capsys.readouterr().err
