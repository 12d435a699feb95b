"""Checkpoints that are whole or not there: written aside, flushed to the disk, then renamed.

A run directory holds `checkpoints/step_000005` and so on; whatever has that name is complete. The tensors are written
by torch.distributed.checkpoint in each rank's shards, so that another number of processes can read them.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from flathead.engines.base import Engine

_STATE = "trainer.json"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _flush(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _flush_entry(path)


def replace_directory(made: Path, final: Path) -> None:
    """Puts a finished directory in its place; a crash leaves the old one or the new one, never half of either."""
    _flush(made)
    if final.exists():
        aside = final.with_name(final.name + ".old")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        made.rename(final)
        shutil.rmtree(aside)
    else:
        made.rename(final)
    _flush_entry(final.parent)


def write_text(path: Path, text: str) -> None:
    """Replaces a file whole."""
    made = path.with_name(f".{path.name}.partial")
    made.write_text(text)
    _flush_entry(made)
    made.rename(path)
    _flush_entry(path.parent)


def _flush_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def latest(run_dir: Path) -> Path | None:
    """The last whole checkpoint of a run."""
    return max((run_dir / "checkpoints").glob("step_" + "[0-9]" * 6), default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / _STATE).read_text())


def save(run_dir: Path, step: int, engine: Engine, state: dict[str, Any], keep: int) -> Path:
    """Writes `checkpoints/step_<step>` and removes all but the last `keep`. All ranks take part."""
    final = run_dir / "checkpoints" / f"step_{step:06d}"
    made = final.with_name(f".{final.name}.partial")
    if _rank() == 0:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
    _barrier()
    with _one_process_is_fine():
        save_shards(engine.state_dict(), checkpoint_id=made, no_dist=not dist.is_initialized())
    if _rank() == 0:
        layout = {} if engine.state_layout is None else {"layout": engine.state_layout}
        (made / _STATE).write_text(json.dumps({**state, "step": step, **layout}))
        replace_directory(made, final)
        for old in sorted(final.parent.glob("step_" + "[0-9]" * 6))[:-keep]:
            shutil.rmtree(old)
    _barrier()
    return final


def load(checkpoint: Path, engine: Engine) -> dict[str, Any]:
    """Fills the engine from a checkpoint; returns the trainer's state.

    Errors: ValueError for a checkpoint that only another layout of the engine can read.
    """
    if (layout := read_state(checkpoint).get("layout")) != engine.state_layout:
        raise ValueError(
            f"{checkpoint}: expected a run in the layout it was written by ({layout}), got {engine.state_layout}; "
            "start as many processes with the same parallel sizes, or choose another trainer.run_dir"
        )
    state = engine.state_dict()
    with _one_process_is_fine():
        load_shards(state, checkpoint_id=checkpoint, no_dist=not dist.is_initialized())
    engine.load_state_dict(state)
    return read_state(checkpoint)
