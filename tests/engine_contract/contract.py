"""The contract: what any engine, in any layout, on any rank, must do. Every function here is one case of it."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from transformers import AutoModelForCausalLM

from flathead.batch import PackedBatch
from flathead.engines import base
from flathead.engines.base import Engine
from tests.engine_contract.engines import ENGINES, Row
from tests.engine_contract.reference import (
    OPTIM,
    STATS,
    STEPS,
    TEMPERATURE,
    ModelCase,
    loss_fn,
    naive_stats,
    truth,
    whole_batch,
)
from tests.support.memory import TensorMemory
from tests.support.models import tiny

MODELS = [ModelCase(family, tied) for family in ("qwen3", "llama") for tied in (True, False)]
# SmolLM2's heads, which two ranks cannot share
ODD = [ModelCase("llama", True, heads=(9, 3)), ModelCase("qwen3", False, heads=(3, 1)), ModelCase("qwen2", True)]
ONE = ModelCase("qwen3", True)
# Layouts of two kinds at once, on four ranks: every model and every path once, what two ranks have in all combinations.
COMBINED = list(zip(MODELS, ("fused", "logits-chunked", "logits", "fused-chunked"), strict=True))
PATHS: dict[str, dict[str, Any]] = {
    "fused": {"lm_head": "fused"},
    "fused-chunked": {
        "lm_head": "fused",
        "entropy_from_logits_with_chunking": True,
        "entropy_from_logits_chunk_size": 3,
    },
    "logits": {"lm_head": "logits", "max_token_len_per_gpu": 14},
    "logits-chunked": {
        "lm_head": "logits",
        "entropy_from_logits_with_chunking": True,
        "entropy_from_logits_chunk_size": 3,
    },
}


def my_sequences(engine: Engine) -> list[int]:
    """Data-parallel ranks get unequal shares: the first all that the others, with one sequence each, leave."""
    sequences = list(range(len(whole_batch().lengths)))
    first = len(sequences) - engine.dp_size + 1
    return sequences[:first] if engine.dp_rank == 0 else [sequences[first + engine.dp_rank - 1]]


def my_batch(engine: Engine) -> PackedBatch:
    return whole_batch().select(my_sequences(engine))


def steps(engine: Engine, count: int = STEPS) -> list[dict[str, float]]:
    return [engine.train_step(my_batch(engine), loss_fn, STATS, temperature=TEMPERATURE) for _ in range(count)]


def assert_same_weights(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            got[name], weight, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def training_equals_the_plain_loop(row: Row, case: ModelCase, path: str) -> None:
    """Statistics, loss, metrics, gradient norm and weights after two steps: of one process that packs and splits
    nothing. The micro-batch sizes of the paths differ, and so do the ranks' numbers of micro-batches."""
    engine, expected = row.make(case.model(), OPTIM, **PATHS[path]), truth(case)
    stats = engine.token_stats(my_batch(engine), STATS, temperature=TEMPERATURE)
    rows = whole_batch().rows_of(my_sequences(engine))
    for name in STATS:
        torch.testing.assert_close(getattr(stats, name), getattr(expected.stats, name)[rows], rtol=1e-5, atol=1e-5)
    for got, wanted in zip(steps(engine), expected.steps, strict=True):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert abs(got[name] - value) <= 1e-5 * max(1.0, abs(value)), f"{name}: {got[name]} instead of {value}"
    assert_same_weights(dict(engine.full_weights()), expected.weights)


def micro_batches_of_any_size_and_checkpointing_give_the_same(row: Row) -> None:
    expected = truth(ONE)
    for options in ({"max_token_len_per_gpu": 14}, {"max_token_len_per_gpu": 25}, {"gradient_checkpointing": True}):
        engine = row.make(ONE.model(), OPTIM, **options)
        for got, wanted in zip(steps(engine), expected.steps, strict=True):
            assert abs(got["grad_norm"] - wanted["grad_norm"]) <= 1e-5 * wanted["grad_norm"], options
        assert_same_weights(dict(engine.full_weights()), expected.weights)


def bfloat16_is_close_and_keeps_fp32_masters(row: Row) -> None:
    for lm_head in ("fused", "logits"):
        engine, expected = row.make(ONE.model(), OPTIM, dtype="bfloat16", lm_head=lm_head), truth(ONE)
        for got, wanted in zip(steps(engine), expected.steps, strict=True):
            assert abs(got["loss"] - wanted["loss"]) <= 0.02, lm_head
            assert abs(got["grad_norm"] - wanted["grad_norm"]) <= 0.05 * wanted["grad_norm"], lm_head
        assert {weight.dtype for _, weight in engine.full_weights()} == {torch.float32}


def statistics_without_gradient_keep_nothing(row: Row) -> None:
    for path in ("fused", "logits"):
        engine = row.make(ONE.model(), OPTIM, **PATHS[path])
        batch = my_batch(engine)
        engine.token_stats(batch)  # FSDP2 sets itself up in the first forward
        with TensorMemory() as memory:
            stats = engine.token_stats(batch, STATS)
            kept, deadline = len(STATS) * 4 * len(batch.input_ids_N), time.monotonic() + 10
            while memory.live > kept and time.monotonic() < deadline:
                time.sleep(0.01)  # gloo's thread may hold what it sent for a moment longer
            assert memory.live <= kept, f"{path}: {memory.live} bytes"
        assert not any(getattr(stats, name).requires_grad for name in STATS)


def a_saved_state_continues_as_if_never_interrupted(row: Row) -> None:
    engine = row.make(ONE.model(), OPTIM)
    steps(engine, 1)
    with _shared_directory() as directory:
        dcp.save(engine.state_dict(), checkpoint_id=directory)
        uninterrupted, weights = steps(engine, 1), dict(engine.full_weights())
        resumed = row.make(ONE.model(seed=5), OPTIM)
        state = resumed.state_dict()
        dcp.load(state, checkpoint_id=directory)
        resumed.load_state_dict(state)
    assert steps(resumed, 1) == uninterrupted
    assert_same_weights(dict(resumed.full_weights()), weights, tolerance=0.0)


def exported_weights_are_whole_and_loadable(row: Row) -> None:
    for case in (case for case in (*MODELS[:2], *ODD) if row.takes(case.family, case.heads)):
        model = case.model()
        expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        engine = row.make(model, OPTIM)
        assert_same_weights(dict(engine.full_weights()), expected, tolerance=0.0)
        with _shared_directory() as directory:
            engine.save_pretrained(directory)
            loaded = AutoModelForCausalLM.from_pretrained(directory)
        assert type(loaded) is type(case.model())
        assert_same_weights(dict(loaded.named_parameters()), expected, tolerance=0.0)


def all_ranks_start_from_the_first_ones_weights(row: Row) -> None:
    expected = dict(ONE.model(seed=0).named_parameters())
    engine = row.make(ONE.model(seed=dist.get_rank() if dist.is_initialized() else 0), OPTIM)
    assert_same_weights(dict(engine.full_weights()), {n: w.detach() for n, w in expected.items()}, tolerance=0.0)


def every_sample_has_its_own_temperature(row: Row) -> None:
    whole = whole_batch()
    spread = torch.linspace(0.5, 2.0, len(whole.lengths)).repeat_interleave(torch.tensor(whole.lengths))
    whole = whole.replace(temperature_N=spread)
    with torch.no_grad():
        expected = naive_stats(ONE.model(), whole)
    for path in ("fused", "logits-chunked"):
        engine = row.make(ONE.model(), OPTIM, **PATHS[path], max_token_len_per_gpu=25)
        mine = whole.select(my_sequences(engine))
        stats, rows = engine.token_stats(mine, STATS), whole.rows_of(my_sequences(engine))
        for name in STATS:
            torch.testing.assert_close(getattr(stats, name), getattr(expected, name)[rows], rtol=1e-5, atol=1e-5)
        try:
            engine.token_stats(mine, temperature=0.5)
        except ValueError as error:
            assert "temperature: has no effect with the batch's own temperature_N" in str(error)
        else:
            raise AssertionError("two temperatures were accepted")


def a_fused_head_makes_no_logits(row: Row) -> None:
    """Nor anything as large: in statistics and in a training step no tensor of this rank's tokens x vocabulary is made.
    With lm_head=logits, the control, there is one. The vocabulary is far above the batch, whose masks are (N, N)."""
    vocab_size = 4096
    tokens = [3 + i % 500 for i in range(60)]
    batch = PackedBatch.from_sequences([tokens[:20]] * 10, [tokens[20:]] * 10)
    entries = len(batch.input_ids_N)
    batch = batch.replace(advantages_N=torch.ones(entries), old_log_prob_N=torch.full((entries,), -6.0))
    for lm_head in ("fused", "logits"):
        budget = {"stats_memory_budget": 100_000} if lm_head == "fused" else {}
        model = tiny(ONE.family, tie_word_embeddings=ONE.tied, vocab_size=vocab_size)
        engine = row.make(model, OPTIM, lm_head=lm_head, **budget)
        engine.token_stats(batch)  # FSDP2 sets itself up in the first forward
        logits_bytes = 4 * entries * vocab_size // (engine.tp_size * engine.cp_size)
        with TensorMemory() as memory:
            engine.token_stats(batch)
            engine.train_step(batch, loss_fn, STATS)
        largest = _most_over_ranks(memory.largest)  # the head is on a pipeline's last stage alone
        assert (largest < 0.9 * logits_bytes) is (lm_head == "fused"), f"{lm_head}: {largest} of {logits_bytes} bytes"


def _most_over_ranks(value: int) -> int:
    if not dist.is_initialized():
        return value
    most = torch.tensor(value)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def masters_begin_at_the_exact_weights(row: Row) -> None:
    """Not at weights rounded to bf16, which small steps would not leave."""
    engine = row.make(ONE.model(), OPTIM, dtype="bfloat16")
    (tensors,) = (value for key, value in engine.state_dict().items() if key.startswith("rank"))
    masters = torch.cat([tensor.flatten() for name, tensor in tensors.items() if name.endswith(".master")])
    exact = torch.cat([weight.detach().flatten() for weight in ONE.model().parameters() if weight.ndim > 1])
    assert masters.dtype == torch.float32 and masters.numel() > 1000
    off_grid = (masters != masters.bfloat16().float()).float().mean()
    assert off_grid > 0.9 and torch.isin(masters[:200], torch.cat([exact, torch.ones(1)])).all()


def padded_vocabularies_and_sequences_of_one_token(row: Row) -> None:
    """511 tokens, which ranks cannot share evenly, and ranks that have next to nothing of a micro-batch."""
    batch = PackedBatch.from_sequences([[3], [4], [5, 6], [7]], [[], [8], [], [9, 10, 11]])
    entries = len(batch.input_ids_N)
    batch = batch.replace(advantages_N=torch.linspace(-1, 1, entries), old_log_prob_N=torch.full((entries,), -6.0))
    for tied, path in ((True, "fused"), (False, "logits")):
        model, other = (tiny("qwen3", tie_word_embeddings=tied, vocab_size=511) for _ in range(2))
        expected = naive_stats(model, batch)
        loss = (batch.weight_N * loss_fn(expected, batch)[0]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        weights = {name: weight.detach().clone() for name, weight in other.named_parameters()}
        options = {"lm_head": path, "max_token_len_per_gpu": 4, "gradient_checkpointing": tied}
        engine = row.make(other, OPTIM, **options)
        assert_same_weights(dict(engine.full_weights()), weights, tolerance=0.0)
        mine = list(range(len(batch.lengths)))[engine.dp_rank :: engine.dp_size]
        stats, rows = engine.token_stats(batch.select(mine), STATS, temperature=TEMPERATURE), batch.rows_of(mine)
        for name in STATS:
            wanted = getattr(expected, name).detach()[rows]
            torch.testing.assert_close(getattr(stats, name), wanted, rtol=1e-5, atol=1e-5)
        got = engine.train_step(batch.select(mine), loss_fn, STATS, temperature=TEMPERATURE)
        assert abs(got["grad_norm"] - norm) <= 1e-5 * norm, f"{path}: {got['grad_norm']} instead of {norm}"


def options_arrive_at_the_statistics(row: Row) -> None:
    """The chunk size, the budget and the temperature, as configured, at every call of the library."""
    chunking = {"entropy_from_logits_with_chunking": True, "entropy_from_logits_chunk_size": 5}
    for lm_head, name in (("fused", "linear_token_stats"), ("logits", "token_stats")):
        budget = {"stats_memory_budget": 12345} if lm_head == "fused" else {}
        for options in (chunking, budget):
            engine = row.make(ONE.model(), OPTIM, lm_head=lm_head, **options)
            with patch.object(base, name, wraps=getattr(base, name)) as call:
                engine.token_stats(my_batch(engine), temperature=0.7)
                steps(engine, 1)
            calls = [None] * (dist.get_world_size() if dist.is_initialized() else 1)
            if dist.is_initialized():
                dist.all_gather_object(calls, len(call.call_args_list))
            assert call.call_args_list or any(calls)  # a pipeline's head is on its last stage alone
            if call.call_args_list:
                assert {c.kwargs["temperature"] for c in call.call_args_list} == {0.7, TEMPERATURE}
            for c in call.call_args_list:
                whole = None if lm_head == "fused" else len(c.args[0])
                assert c.kwargs["chunk_size"] == (5 if options is chunking else whole)
                assert c.kwargs.get("memory_budget") == options.get("stats_memory_budget")


def _shared_directory() -> "_SharedDirectory":
    return _SharedDirectory()


class _SharedDirectory:
    """One temporary directory for all ranks, gone after all of them are through."""

    def __enter__(self) -> str:
        self.local = tempfile.TemporaryDirectory()
        names = [self.local.name]
        if dist.is_initialized():
            dist.broadcast_object_list(names, src=0)
        return str(Path(names[0]))

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.barrier()
        self.local.cleanup()


def contract(family: str, world: int) -> dict[str, Callable[[int, int], None]]:
    """The cases for a family's engines on that many ranks: name -> function of rank and world."""
    found: dict[str, Callable[[], None]] = {}
    for row in (row for row in ENGINES if (row.family, row.world) == (family, world)):
        for case, path in product(MODELS, PATHS) if world < 4 else COMBINED:
            found[f"{row.name} {case} {path}"] = partial(training_equals_the_plain_loop, row, case, path)
        for case in (case for case in ODD if row.takes(case.family, case.heads)):
            found[f"{row.name} {case}"] = partial(training_equals_the_plain_loop, row, case, "fused")
        for function in (
            micro_batches_of_any_size_and_checkpointing_give_the_same,
            bfloat16_is_close_and_keeps_fp32_masters,
            statistics_without_gradient_keep_nothing,
            a_saved_state_continues_as_if_never_interrupted,
            exported_weights_are_whole_and_loadable,
            all_ranks_start_from_the_first_ones_weights,
            every_sample_has_its_own_temperature,
            a_fused_head_makes_no_logits,
            options_arrive_at_the_statistics,
        ):
            found[f"{row.name} {function.__name__}"] = partial(function, row)
        if family == "megatron":
            found[f"{row.name} masters"] = partial(masters_begin_at_the_exact_weights, row)
            found[f"{row.name} padding"] = partial(padded_vocabularies_and_sequences_of_one_token, row)
    return {name: lambda rank, world, case=case: case() for name, case in found.items()}
