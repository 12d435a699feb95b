"""Draws docs/memory.png: what the LM head adds to memory as the sequence grows, the naive way and with Flathead.

    python docs/memory.py              measure on this machine, write docs/memory.json, draw
    python docs/memory.py --redraw     draw docs/memory.json as it is

Measured by `flathead.bench.extra_bytes`: the peak of the allocator during forward and backward of log-probability and
entropy, less the gradients, for the head of SmolLM2-135M (V=49152, H=576) in bf16.
"""

import json
import sys
from pathlib import Path

import torch

from flathead import bench

HERE = Path(__file__).parent
LENGTHS = {"naive": [512, 1024, 2048, 4096, 8192], "flathead": [512, 1024, 2048, 4096, 8192, 16384, 32768]}


def measure() -> dict:
    points: dict[str, list[list[int]]] = {name: [] for name in LENGTHS}
    for name, lengths in LENGTHS.items():
        for tokens in lengths:
            problem = bench.Problem.of(bench.Case("hidden", torch.bfloat16, tokens, vocab=49152, hidden=576))
            points[name].append([tokens, bench.extra_bytes(problem, bench.METHODS["hidden"][name])])
            print(name, *points[name][-1], flush=True)
    return {"machine": bench.machine(), "vocab": 49152, "hidden": 576, "dtype": "bfloat16", "extra_bytes": points}


def draw(data: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for (name, points), colour in zip(data["extra_bytes"].items(), ("#b0403a", "#1f5f99"), strict=True):
        tokens, extra = zip(*points, strict=True)
        axes.plot(tokens, [value / 2**30 for value in extra], "o-", color=colour, linewidth=2)
        size = f"{extra[-1] / 2**30:.1f} GiB" if extra[-1] >= 2**30 else f"{extra[-1] / 2**20:.0f} MiB"
        label, end = f"{name}: {size} at {tokens[-1]} tokens", (tokens[-1], extra[-1] / 2**30)
        offset, side = ((10, -4), "left") if name == "naive" else ((0, 9), "right")
        axes.annotate(label, end, offset, textcoords="offset points", ha=side, color=colour)
    axes.set(xlabel="tokens in the micro-batch", ylabel="extra memory, GiB", ylim=(-0.25, None))
    axes.set_title(f"LM head, forward + backward: V={data['vocab']}, H={data['hidden']}, {data['dtype']}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(HERE / "memory.png", dpi=110)


if __name__ == "__main__":
    file = HERE / "memory.json"
    if "--redraw" not in sys.argv[1:]:
        file.write_text(json.dumps(measure(), indent=1) + "\n")
    draw(json.loads(file.read_text()))
