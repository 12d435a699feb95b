"""What a run shows and keeps: a live table, metrics.jsonl, TensorBoard events and report.png.

metrics.jsonl has one object a step, "step" counting from 1; a number that is not finite is null. A resumed run cuts it
back to the steps its checkpoint holds, so that no step is there twice. A last line that is torn, because the run was
killed or is writing just now, does not count.
"""

import json
import math
import os
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

# heading -> (metric, format): the columns of the table; a metric the run does not have leaves its cell empty
_COLUMNS = {
    "reward": ("reward", ".3f"),
    "entropy": ("entropy", ".3f"),
    "KL": ("kl", ".4f"),
    "length": ("response_length", ".1f"),
    "grad norm": ("grad_norm", ".2f"),
    "tokens/s": ("tokens_per_second", ".0f"),
    "peak GB": ("peak_memory_gb", ".2f"),
    "seconds": ("seconds", ".1f"),
    "held-out": ("accuracy", ".3f"),
}
_ROWS_SHOWN = 12


class RunLog:
    """A context manager; only the first process has one. `first_step`: the steps done before, by the run resumed from.

    On a terminal (and live): a table of the last steps over a progress bar. Elsewhere: one line a step.
    Errors: ValueError when a metrics.jsonl is there that this class did not write.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        config_yaml: str,
        *,
        live: bool = True,
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        self.path = run_dir / "metrics.jsonl"
        self.rows: deque[list[str]] = deque(maxlen=_ROWS_SHOWN)
        for record in _cut_back(self.path, first_step):
            self.rows.append(_cells(record))
        self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)
        if not first_step:
            self.board.add_text("config", f"```yaml\n{config_yaml}```", 0)
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=40), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=self.console,
        )  # fmt: skip
        self.task = self.progress.add_task("train", total=steps, completed=first_step)
        self.live = Live(console=self.console, auto_refresh=True) if live and self.console.is_terminal else None

    def __enter__(self) -> "RunLog":
        self.file = self.path.open("a")
        if self.live is not None:
            self.live.start()
            self.live.update(self._picture())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()
        self.board.close()
        self.file.close()

    def note(self, text: str) -> None:
        """A line above the table."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def log(self, step: int, values: dict[str, float]) -> None:
        """step counts from 0; what is written counts from 1."""
        finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        record = {"step": step + 1, **finite}
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.board.add_scalar(name, value, step + 1)
        self.rows.append(_cells(record))
        self.progress.update(self.task, completed=step + 1)
        if self.live is not None:
            self.live.update(self._picture())
        else:
            shown = [f"{name} {cell}" for name, cell in zip(_COLUMNS, self.rows[-1][1:], strict=True) if cell]
            total = self.progress.tasks[0].total
            self.note(f"step {step + 1}/{total:.0f}  " + "  ".join(shown))

    def _picture(self) -> Group:
        table = Table("step", *_COLUMNS, box=None, header_style="bold")
        for column in table.columns:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*row)
        return Group(table, self.progress)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl. Errors: ValueError when the directory has none."""
    records = _read(run_dir / "metrics.jsonl")
    if not records:
        raise ValueError(f"RUN_DIR: expected a run directory with a step in metrics.jsonl, got {str(run_dir)!r}")
    return records


def plot_report(run_dir: Path) -> Path:
    """Draws report.png from metrics.jsonl and, if there, result.json; returns its path. Errors: as `read_metrics`."""
    records = read_metrics(run_dir)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    reward = axes[0, 0]
    _curve(reward, records, "reward", "Reward", "mean over the samples of a step", "tab:blue")
    _held_out(reward, records, run_dir / "result.json")
    _curve(axes[0, 1], records, "entropy", "Entropy", "nats per response token", "tab:purple")
    if any("kl" in record for record in records):
        _curve(axes[1, 0], records, "kl", "KL to the first model", "nats per response token", "tab:red")
    else:
        _curve(axes[1, 0], records, "response_length", "Response length", "tokens", "tab:red")
    _curve(axes[1, 1], records, "peak_memory_gb", "Peak memory", "GB, first process", "tab:green")
    figure.suptitle(f"{run_dir.resolve().name}: {records[-1]['step']} steps")
    path = run_dir / "report.png"
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error}") from error
    return path


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """result.json of a finished run, None without one. Errors: ValueError for a file that is something else."""
    path = run_dir / "result.json"
    if not path.is_file():
        return None
    result = _parsed(path.read_bytes())
    if not (isinstance(result, dict) and all(_is_number(result.get(key)) for key in ("steps", "before", "after"))):
        raise ValueError(f"{path}: expected numbers named steps, before and after, got {result!r}; remove the file")
    return result


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parsed(line: bytes) -> Any:
    """JSON; NaN and infinities, which are not JSON though Python writes them, are null. None for what is not JSON."""
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None


def _curve(axis: Axes, records: list[dict[str, Any]], name: str, title: str, unit: str, color: str) -> None:
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_ylabel(unit)
    axis.set_xlabel("step")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if points:
        marker = "o" if len(points) < 60 else ""
        axis.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=3, label=title.lower())
        values = [value for _, value in points]
        axis.set_ylim(bottom=min(0.0, *values), top=1.15 * max(*values, 1e-6))
    else:
        axis.text(0.5, 0.5, "not part of this run", transform=axis.transAxes, ha="center", color="gray")


def _held_out(axis: Axes, records: list[dict[str, Any]], result: Path) -> None:
    points = {record["step"]: record["accuracy"] for record in records if record.get("accuracy") is not None}
    if (outcome := read_result(result.parent)) is not None:
        points |= {0: outcome["before"], outcome["steps"]: outcome["after"]}
    if points:
        axis.plot(*zip(*sorted(points.items()), strict=True), "s--", color="tab:orange", label="held-out accuracy")
        halo = [withStroke(linewidth=3, foreground="white")]
        for step, value in points.items():
            label = axis.annotate(f"{value:.2f}", (step, value), (0, 7), textcoords="offset points", fontsize=8)
            label.set(ha="center", path_effects=halo)
    axis.set_ylim(0, 1.15)
    if axis.lines:
        axis.legend(frameon=False, loc="lower right")


def _read(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, none without one. Errors: ValueError for a line, but the last, that is none."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parsed(line)
        if isinstance(record, dict) and _is_number(record.get("step")):
            for name, value in record.items():
                if not (value is None or _is_number(value)):
                    raise ValueError(f"{path}, line {number}, {name}: expected a number or null, got {value!r}")
            finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in record.items()}
            records.append(finite)
        elif number < len(lines):
            got = line[:60].decode(errors="replace")
            raise ValueError(f"{path}, line {number}: expected a JSON object with a step, got {got!r}")
    return records


def _cut_back(path: Path, steps: int) -> list[dict[str, Any]]:
    """Leaves only the records of the first `steps` steps in the file; returns them."""
    records = [record for record in _read(path) if record["step"] <= steps]
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)  # whoever reads meanwhile, or after a crash here, finds the old lines or the new ones
    return records


def _cells(record: dict[str, Any]) -> list[str]:
    """A row of the table; "-" for a number that was not finite."""
    numbers = ((record.get(name, ""), spec) for name, spec in _COLUMNS.values())
    cells = ["-" if number is None else number if number == "" else format(number, spec) for number, spec in numbers]
    return [str(record["step"]), *cells]
