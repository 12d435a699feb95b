"""`flathead bench`: log-probability and entropy with their gradients, method beside method, in one run on this machine.

Every method computes the same thing: forward, then backward with the same random upstream gradients of both statistics,
to the logits, or to the hidden states and the head weight. Reported per method:

- time: the median over rounds, where every round runs all the methods one after another, so that a slow moment of the
  machine meets them all; and its ratio to the naive method;
- extra: the peak of the bytes that torch's allocator handed out during forward and backward (the profiler's allocation
  events, so temporaries inside an operation count too), less the gradients themselves;
- errors on some rows against float64: the largest absolute error of a statistic, and the largest error of the gradient
  of logits or hidden states relative to its largest element.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import flathead

Method = Callable[..., tuple[Tensor, Tensor]]  # (logits_NV, or hidden_NH and weight_VH; labels_N) -> log_prob, entropy


def naive_logits(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    log_p_NV = F.log_softmax(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), -1)
    return log_p_NV.gather(-1, labels_N[:, None]).squeeze(-1), -(log_p_NV.exp() * log_p_NV).sum(-1)


def naive_hidden(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    return naive_logits(F.linear(hidden_NH, weight_VH), labels_N)


def flathead_logits(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    return _both(flathead.token_stats(logits_NV, labels_N))


def flathead_hidden(hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    return _both(flathead.linear_token_stats(hidden_NH, weight_VH, labels_N))


def _both(stats: flathead.TokenStats) -> tuple[Tensor, Tensor]:
    assert stats.log_prob is not None and stats.entropy is not None
    return stats.log_prob, stats.entropy


# One entry is all that a new method needs. The first of each is the truth's formula and the one that others divide by.
METHODS: dict[str, dict[str, Method]] = {
    "logits": {"naive": naive_logits, "flathead": flathead_logits},
    "hidden": {"naive": naive_hidden, "flathead": flathead_hidden},
}


@dataclass(frozen=True)
class Case:
    source: str  # a key of METHODS
    dtype: torch.dtype
    tokens: int
    vocab: int
    hidden: int | None = None  # None when the source is logits

    @property
    def name(self) -> str:
        width = "" if self.hidden is None else f", H={self.hidden}"
        return f"{self.source} {str(self.dtype).removeprefix('torch.')}, N={self.tokens}{width}, V={self.vocab}"

    @property
    def logits_bytes(self) -> int:
        return self.tokens * self.vocab * self.dtype.itemsize


CASES = {
    "logits-fp32": Case("logits", torch.float32, 4096, 32768),
    "logits-bf16": Case("logits", torch.bfloat16, 4096, 32768),
    "hidden-bf16": Case("hidden", torch.bfloat16, 2048, 65536, 1024),
}


@dataclass(frozen=True)
class Problem:
    inputs: tuple[Tensor, ...]
    labels_N: Tensor
    upstream: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> "Problem":
        generator = torch.Generator().manual_seed(seed)
        shapes = [(case.tokens, case.vocab)]
        if case.hidden is not None:
            shapes = [(case.tokens, case.hidden), (case.vocab, case.hidden)]
        inputs = [torch.randn(shape, generator=generator, dtype=case.dtype) for shape in shapes]
        inputs[-1] *= 2 / math.sqrt(case.hidden or 1)  # logits of standard deviation 2
        labels_N = torch.randint(case.vocab, (case.tokens,), generator=generator)
        upstream_2N = torch.randn(2, case.tokens, generator=generator)
        return cls(tuple(x.requires_grad_() for x in inputs), labels_N, (upstream_2N[0], upstream_2N[1]))

    def rows_in_float64(self, rows: slice) -> "Problem":
        first, *rest = (x.detach() for x in self.inputs)
        inputs = tuple(x.double().requires_grad_() for x in (first[rows], *rest))
        return Problem(inputs, self.labels_N[rows], (self.upstream[0][rows].double(), self.upstream[1][rows].double()))

    def solve(self, method: Method) -> tuple[Tensor, Tensor]:
        """Both statistics; the gradients, of this call alone, are then in `.grad` of the inputs."""
        for x in self.inputs:
            x.grad = None
        stats = method(*self.inputs, self.labels_N)
        torch.autograd.backward(stats, self.upstream)
        return stats[0].detach(), stats[1].detach()


def extra_bytes(problem: Problem, method: Method) -> int:
    """Peak of what the allocator handed out in forward and backward, less the gradients that are left at the end."""
    problem.solve(method)  # the first call of an operation may allocate what later ones reuse
    for x in problem.inputs:
        x.grad = None
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _no_native_stderr():  # the profiler's backend writes two lines of its own there
        profiler.start()
    problem.solve(method)
    with _no_native_stderr():
        profiler.stop()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]  # there since it has run
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()  # type: ignore[attr-defined]  # torch's stub of the event leaves it out
        peak = max(peak, live)
    return peak - sum(x.grad.nbytes for x in problem.inputs if x.grad is not None)


@contextlib.contextmanager
def _no_native_stderr() -> Iterator[None]:
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@dataclass(frozen=True)
class Result:
    case: str
    method: str
    seconds: float
    time_ratio: float  # to the naive method
    extra_bytes: int
    extra_over_logits: float  # in units of one logits matrix in the input dtype
    value_error: float
    gradient_error: float


def errors(problem: Problem, method: Method, truth: Method, rows: slice) -> tuple[float, float]:
    exact = problem.rows_in_float64(rows)
    exact_stats = exact.solve(truth)
    found_stats = problem.solve(method)
    value = max(float((f[rows] - e).abs().max()) for f, e in zip(found_stats, exact_stats, strict=True))
    found, wanted = problem.inputs[0].grad, exact.inputs[0].grad
    assert found is not None and wanted is not None
    return value, float((found[rows] - wanted).abs().max() / wanted.abs().max())


def measure(case: Case, rounds: int, error_rows: int = 32) -> list[Result]:
    problem, methods = Problem.of(case), METHODS[case.source]
    truth = next(iter(methods.values()))
    wrong = {name: errors(problem, method, truth, slice(error_rows)) for name, method in methods.items()}
    extra = {name: extra_bytes(problem, method) for name, method in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            begin = time.perf_counter()
            problem.solve(method)
            seconds[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    base = next(iter(median.values()))
    in_logits = {name: extra[name] / case.logits_bytes for name in methods}
    return [
        Result(case.name, name, median[name], median[name] / base, extra[name], in_logits[name], *wrong[name])
        for name in methods
    ]


def machine() -> dict[str, str | int]:
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flathead": flathead.__version__,
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def cells(result: Result) -> list[str]:
    return [
        result.method,
        f"{result.seconds * 1e3:.0f} ms",
        f"{result.time_ratio:.2f}",
        f"{result.extra_bytes / 2**20:.1f} MiB",
        f"{result.extra_over_logits:.3f}",
        f"{result.value_error:.1e}",
        f"{result.gradient_error:.1e}",
    ]


COLUMNS = ["method", "time", "ratio", "extra", "x logits", "value err", "grad err"]


def show(case: Case, results: Sequence[Result]) -> None:
    """A rich table where rich is installed, and the same in plain text where it is not."""
    rows = [cells(result) for result in results]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(case.name, *(" ".join(f"{cell:>14}" for cell in row) for row in [COLUMNS, *rows]), sep="\n")
        return
    table = Table(*COLUMNS, title=case.name, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="flathead bench", description="Time, memory and error beside the naive way.")
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all of them")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over so many (default 5)")
    for letter, name in (("N", "tokens"), ("V", "vocab"), ("H", "hidden")):
        parser.add_argument(f"--{name}", type=int, help=f"another {letter} than the case's own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the machine and every number there")
    options = parser.parse_args(argv)
    for name in ("rounds", "tokens", "vocab", "hidden"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: expected at least 1, got {value}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    results: list[Result] = []
    for case in (CASES[name] for name in options.case or CASES):
        case = replace(
            case,
            tokens=options.tokens or case.tokens,
            vocab=options.vocab or case.vocab,
            hidden=case.hidden and (options.hidden or case.hidden),
        )
        results += measure(case, options.rounds)
        show(case, results[-len(METHODS[case.source]) :])
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "results": [asdict(r) for r in results]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
