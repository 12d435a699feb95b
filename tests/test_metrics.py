"""The run log as those who read it see it: the file line by line, the events, the screen, the picture."""

import io
import json
import math
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flathead.metrics import RunLog, plot_report, read_metrics


def values(step: int, **more: float) -> dict[str, float]:
    return {"reward": 0.1 * step, "entropy": 1.0, "peak_memory_gb": 2.0, "response_length": 5.0, **more}


def record(run_dir: Path, steps: range, **options: Any) -> str:
    """Logs those steps (counted from 0) and returns what was printed."""
    run_dir.mkdir(exist_ok=True)
    screen = io.StringIO()
    console = Console(file=screen, width=140, force_terminal=options.pop("terminal", False), color_system=None)
    with RunLog(run_dir, 30, "trainer:\n  steps: 30\n", first_step=steps.start, console=console, **options) as log:
        for step in steps:
            log.log(step, values(step))
        log.note("that was [it]")
    return screen.getvalue()


def steps_of(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir)]


def test_each_step_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    with RunLog(tmp_path, 2, "", live=False, console=Console(file=io.StringIO())) as log:
        for step in range(2):
            log.log(step, values(step))
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[step]) == {"step": step + 1, **values(step)}
            assert len(lines) == step + 1


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    screen = io.StringIO()
    with RunLog(tmp_path, 2, "", console=Console(file=screen, width=200)) as log:
        log.log(0, values(0, grad_norm=math.nan, kl=-math.inf))
        log.log(1, values(1, grad_norm=0.5, kl=0.25))
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0], parse_constant=pytest.fail)
    assert first["grad_norm"] is None and first["kl"] is None
    assert "grad norm -" in screen.getvalue().splitlines()[0] and "grad norm 0.50" in screen.getvalue()
    plot_report(tmp_path)


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    record(tmp_path, range(0, 7))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rewa')  # killed while writing
    record(tmp_path, range(5, 10))
    assert steps_of(tmp_path) == list(range(1, 11))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == list(range(1, 11))
    assert events.Tags()["tensors"] == ["config/text_summary"]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


def test_cutting_back_goes_by_step_and_keeps_the_old_file_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, range(0, 3))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def crash(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="power cut"):
        patched.setattr("flathead.metrics.os.fsync", crash)
        record(tmp_path, range(1, 2))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    record(tmp_path, range(1, 2))
    assert steps_of(tmp_path) == [1, 2]
    record(tmp_path, range(0, 1))
    assert steps_of(tmp_path) == [1]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1]


def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nshopping list\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected a JSON object with a step, got 'shopping"):
        record(tmp_path, range(0, 1))
    assert "shopping list" in path.read_text()


def test_without_a_terminal_a_line_a_step(tmp_path: Path) -> None:
    lines = record(tmp_path, range(0, 2), live=True).splitlines()
    assert [line[:11].strip() for line in lines] == ["step 1/30", "step 2/30", "that was [i"]
    assert "reward 0.100" in lines[1] and "KL" not in lines[1] and lines[2] == "that was [it]"
    assert record(tmp_path, range(2, 3), live=False, terminal=True).startswith("step 3/30  reward 0.200")


def test_on_a_terminal_the_last_twelve_steps(tmp_path: Path) -> None:
    record(tmp_path, range(0, 9))
    screen = record(tmp_path, range(9, 15), live=True, terminal=True)
    assert "that was [it]" in screen
    table = screen[screen.rindex("reward") :]  # the last picture drawn
    shown = [line.split()[:2] for line in table.splitlines() if line.strip()[:1].isdigit()]
    assert shown == [[str(n), f"{0.1 * (n - 1):.3f}"] for n in range(4, 16)]
    assert "15/30" in table


@pytest.mark.parametrize("with_kl", [True, False])
@pytest.mark.parametrize("steps", [1, 80])
def test_the_report_is_a_picture_of_what_was_recorded(tmp_path: Path, with_kl: bool, steps: int) -> None:
    with RunLog(tmp_path, steps, "", live=False, console=Console(file=io.StringIO())) as log:
        for step in range(steps):
            log.log(step, values(step, **({"kl": 0.01 * step} if with_kl else {})))
    path = plot_report(tmp_path)
    assert path == tmp_path / "report.png"
    plain = matplotlib.image.imread(path)
    assert plain.shape[0] > 600 and plain.shape[1] > 900
    # held-out accuracies, of a step or of the finished run, show in the reward's quarter of the picture alone
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    marked = {**json.loads(lines[-1]), "accuracy": 0.5}
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(marked)]) + "\n")
    with_accuracy = matplotlib.image.imread(plot_report(tmp_path))
    (tmp_path / "result.json").write_text(json.dumps({"steps": steps, "before": 0.2, "after": 0.8}))
    with_result = matplotlib.image.imread(plot_report(tmp_path))
    for less, more in ((plain, with_accuracy), (with_accuracy, with_result)):
        differs = (less != more).any(axis=-1)
        height, width = differs.shape
        assert differs[: height // 2, : width // 2].any()
        assert not differs[height // 2 :].any()


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    for prepare in (lambda: None, lambda: (tmp_path / "metrics.jsonl").write_text('{"st')):
        prepare()
        with pytest.raises(ValueError, match=r"RUN_DIR: expected a run directory with a step in metrics\.jsonl, got"):
            plot_report(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("result.json", b"{}", r"result\.json: expected numbers named steps, before and after, got \{\}"),
        ("result.json", b"[1]", r"result\.json: expected numbers"),
        ("result.json", b'{"steps": 3, "bef', r"result\.json: expected numbers .* got None"),
        ("result.json", b'{"steps": 3, "before": "0.1", "after": 0.2}', r"result\.json: expected numbers"),
        ("metrics.jsonl", b'{"step": 1, "reward": "high"}\n', r"line 1, reward: expected a number or null, got 'high'"),
        ("metrics.jsonl", b'\xff\xfe\n{"step": 1}\n', r"line 1: expected a JSON object with a step"),
        ("metrics.jsonl", b'{"step": "one"}\n{"step": 2}\n', r"line 1: expected a JSON object with a step"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    record(tmp_path, range(0, 2))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        plot_report(tmp_path)


def test_numbers_that_json_does_not_have_are_gaps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": NaN}\n{"step": 2, "reward": 1e999, "entropy": 1}\n')
    assert [row["reward"] for row in read_metrics(tmp_path)] == [None, None]
    assert plot_report(tmp_path).is_file()


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    record(tmp_path, range(0, 2))
    (tmp_path / "report.png").mkdir()
    with pytest.raises(ValueError, match=r"report\.png: cannot be written"):
        plot_report(tmp_path)
