"""This process among the others and on its machine: process group, signals, peak memory."""

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from flathead import engines

_SAME_KEY = 2.0  # seconds: torchrun passes on a Ctrl-C that the terminal has sent to every process already


def say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


@contextmanager
def process_group() -> Iterator[None]:
    """The default group when torchrun started several processes; whatever groups there are, are gone afterwards."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        engines.leave_groups()
        if dist.is_initialized():
            dist.destroy_process_group()


class StopSignals:
    """SIGINT and SIGTERM ask the run to end after its step; a later SIGINT ends it at once, at the last checkpoint.

    exit_code: the shell's for the signal, once `agreed` has said True.
    """

    exit_code = 0

    def __enter__(self) -> "StopSignals":
        self.asked, self.asked_at = 0, 0.0
        self.previous = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self.asked_at = number, now
            if os.environ.get("RANK", "0") == "0":  # os.write: print is not reentrant
                os.write(2, b"\nstopping after this step, with a checkpoint (Ctrl-C again: at once)\n")
        elif number == signal.SIGINT and now - self.asked_at > _SAME_KEY:
            raise KeyboardInterrupt

    def agreed(self) -> bool:
        """Whether any process was asked to stop; all processes get the same answer."""
        number = self.asked
        if dist.is_initialized():
            flag = torch.tensor(number, device="cuda" if torch.cuda.is_available() else "cpu")
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            number = int(flag.item())
        self.exit_code = 128 + number if number else 0
        return number > 0


_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text("5")  # Linux: the resident peak (VmHWM) starts again from now


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on an accelerator, the process's resident peak on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.is_file():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
