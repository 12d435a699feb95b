"""Writes the tables of docs/megatron.md: peak bytes of the statistics on Megatron's paths as the sequence grows.

    python docs/megatron_memory.py                           measure on this machine (minutes), print both tables
    python docs/megatron_memory.py --tokens 512 --vocab 4096 --tp 1 2     smaller

Measured on every rank of real process groups by `flathead.bench.extra_bytes`, bf16: the peak of the allocator during
forward and backward of log-probability and entropy, less the gradients of hidden states and weight; so the logits
themselves count where a path makes them.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from flathead import VocabShard, bench, linear_token_stats, token_stats

PATHS = {"logits, unchunked": None, "logits, chunk 2048": 2048, "fused": None}  # rows of a chunk
# Qwen3.5-35B-A3B: vocabulary and width of its configuration
QWEN = {"vocab": 248320, "hidden": 2048}


def statistics_of(path: str, shard: VocabShard | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """What the engine's last stage does with hidden states (N, H) and its head weight (V / tp, H)."""

    def method(hidden_NH: Tensor, weight: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        if path == "fused":
            stats = linear_token_stats(hidden_NH, weight, labels_N, shard=shard)
        else:
            rows = PATHS[path] or len(labels_N)
            logits = torch.nn.functional.linear(hidden_NH, weight)
            stats = token_stats(logits, labels_N, shard=shard, chunk_size=rows, inplace_backward=True)
        assert stats.log_prob is not None and stats.entropy is not None
        return stats.log_prob, stats.entropy

    return method


def rank(index: int, tp: int, directory: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, 2 // tp))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=index, world_size=tp)
    width = options.vocab // tp
    shard = VocabShard.from_group(dist.group.WORLD, width) if tp > 1 else None
    for tokens in options.tokens:
        problem = bench.Problem.of(bench.Case("hidden", torch.bfloat16, tokens, width, options.hidden))
        most = [bench.extra_bytes(problem, statistics_of(path, shard)) for path in PATHS]
        worst = torch.tensor(most)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if index == 0:
            with (Path(directory) / "rows").open("a") as rows:
                cells = (f"{value / 2**20:.0f} MiB" for value in worst.tolist())
                rows.write(f"| {tp} | {tokens} | " + " | ".join(cells) + " |\n")
    dist.destroy_process_group()


def on_paper(tp: int, tokens: int) -> list[float]:
    """GiB a rank at Qwen3.5-35B-A3B's shapes: bf16 logits; two fp32 copies of them, or of 2048 rows; fused: the budget
    on a device of 80 GB, and the fp32 hidden gradient."""
    row = QWEN["vocab"] / tp
    unchunked = tokens * row * (2 + 2 * 4)
    chunked = tokens * row * 2 + min(tokens, 2048) * row * 2 * 4
    fused = 80 * 10**9 / 256 + tokens * QWEN["hidden"] * 4
    return [value / 2**30 for value in (unchunked, chunked, fused)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 20480])
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    head = f"| TP | tokens | {' | '.join(PATHS)} |\n|---|---|" + "---|" * len(PATHS)
    print(f"measured, V={options.vocab}, H={options.hidden}, bf16, the most of any rank\n\n{head}")
    for tp in options.tp:
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(rank, (tp, directory, options), nprocs=tp)  # type: ignore[attr-defined]  # torch's stub lacks it
            print((Path(directory) / "rows").read_text(), end="", flush=True)
    print(f"\non paper, V={QWEN['vocab']}, H={QWEN['hidden']} (Qwen3.5-35B-A3B), bf16, a rank\n\n{head}")
    for tp in (1, 2, 4, 8):
        for tokens in (2048, 20480):
            print(f"| {tp} | {tokens} | " + " | ".join(f"{value:.1f} GiB" for value in on_paper(tp, tokens)) + " |")


if __name__ == "__main__":
    main()
