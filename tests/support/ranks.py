"""Real gloo processes: every case of a module in one launch, the outcomes in files, and an end to every hang."""

import importlib
import json
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, world: int, module: str, directory: str, timeout: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    with open(Path(directory) / f"rank{rank}.jsonl", "w", buffering=1) as outcomes:
        for name, case in _cases(module).items():
            try:
                case(rank, world)
                outcome = "ok"
            except BaseException:  # whatever it was, the test that asked for this case shows it
                outcome = traceback.format_exc()
            outcomes.write(json.dumps([name, outcome]) + "\n")
            if outcome != "ok":
                break  # the ranks may disagree about the next collective: nothing after this would be meaningful
    dist.destroy_process_group()


def _cases(module: str) -> dict[str, Callable[[int, int], None]]:
    name, _, attribute = module.partition(":")
    return getattr(importlib.import_module(name), attribute or "CASES")


def run_cases(module: str, world: int, directory: Path, timeout: float = 120.0) -> dict[str, list[str]]:
    """Runs ``module.CASES``, or ``module:NAME`` (name -> function of rank and world) on ``world`` ranks.

    Returns name -> one outcome per rank.

    An outcome is "ok", the traceback, or "did not finish": after a failure, or a hang longer than ``timeout`` seconds.
    """
    spawn = mp.get_context("spawn")
    processes = [
        spawn.Process(target=_rank, args=(rank, world, module, str(directory), timeout / 2)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    results: dict[str, list[str]] = {}
    for rank in range(world):
        path = directory / f"rank{rank}.jsonl"
        done = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}
        for name in _cases(module):
            results.setdefault(name, []).append(done.get(name, "did not finish"))
    return results
