"""verl's real engines, each micro-batch once with stock verl and once with Flathead in it, against float64's values."""

from collections.abc import Callable
from functools import partial

import torch

from tests.support.verl_engine import Outcome, Run, counted, flathead_in_verl, lengths, megatron_outcome, outcome, truth

_NAMES = {"log_probs": "log_prob", "entropy": "entropy", "sum_pi_squared": "sum_pi_squared"}
_TOLERANCE = 2e-5  # of fp32 logits up to 20, and relative of a gradient
_WIDE = {"vocab": 8192, "repeat": 8}  # logits larger than all the rest of the model


def check_values(got: Outcome, values: dict[str, torch.Tensor], kept: torch.Tensor) -> None:
    assert got.values.keys() == values.keys()
    for name, expected in values.items():
        torch.testing.assert_close(got.values[name].double()[kept], expected[kept], rtol=1e-5, atol=_TOLERANCE)


def check_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, gradient in expected.items():
        error = (got[name].double() - gradient).norm() / gradient.norm()
        assert error < _TOLERANCE, (name, float(error))


def check_calls(calls: list[dict], run: Run) -> None:
    """One pass, of what was asked, with the chunk size that was asked."""
    (call,) = calls
    assert call["name"] == ("linear_token_stats" if run.fused else "token_stats")
    assert call["stats"] == tuple(_NAMES[key] for key in run.keys)
    assert call["chunk_size"] == run.chunk_size


def compare(rank: int, world: int, *, run: Run, stock_raises: str | None = None) -> None:
    """stock_raises: what stock verl says to this configuration, where it has no result."""
    values, gradients = truth(world, run)
    kept = counted(rank, run)
    if stock_raises is None:
        stock = outcome(rank, run)
        check_values(stock, values[rank], kept)
        check_gradients(stock.gradients, gradients)
    else:
        expect_error(lambda: outcome(rank, run), stock_raises)
    with flathead_in_verl() as calls:
        got = outcome(rank, run)
    check_values(got, values[rank], kept)
    check_gradients(got.gradients, gradients)
    check_calls(calls, run)


def expect_error(call: Callable[[], object], text: str) -> None:
    try:
        call()
    except Exception as error:
        assert text in f"{type(error).__name__}: {error}", error
    else:
        raise AssertionError(f"expected {text!r}")


def less_memory(rank: int, world: int, *, run: Run, matrices: int) -> None:
    """Flathead's peak is lower by that many matrices of tokens x V; with a fused head there is none at all."""
    stock = outcome(rank, Run(**{**vars(run), "fused": None}))
    with flathead_in_verl():
        got = outcome(rank, run)
    each = lengths(rank, run)
    matrix = (sum(each) if run.remove_padding else len(each) * max(each)) * run.vocab * 4
    assert got.peak <= stock.peak - matrices * matrix, (got.peak / matrix, stock.peak / matrix)
    if run.fused:
        assert got.largest < matrix
    else:
        assert got.largest <= matrix


def no_worse_in_bf16(rank: int, world: int) -> None:
    """Under autocast the model's rounding is the same; what the statistics add to it is not."""
    run = Run(dtype="bf16")
    values, _ = truth(world, run)
    stock = outcome(rank, run)
    with flathead_in_verl():
        got = outcome(rank, run)
    kept = counted(rank, run)
    for name, expected in values[rank].items():
        error = [float((one.values[name].double() - expected)[kept].norm()) for one in (got, stock)]
        assert error[0] <= 1.05 * error[1], (name, error)
        assert got.values[name].dtype == torch.float32


def megatron(rank: int, world: int, *, run: Run, sequence_parallel: bool = False, stock_raises: str = "") -> None:
    """Logits or head sharded over all ranks; every rank has the same tokens."""
    values, gradients = truth(1, run)
    kept = counted(0, run)
    if stock_raises:
        expect_error(lambda: megatron_outcome(rank, run, world, sequence_parallel), stock_raises)
    else:
        stock = megatron_outcome(rank, run, world, sequence_parallel)
        check_values(stock, values[0], kept)
        if "sum_pi_squared" not in run.keys or world == 1:  # verl's has no gradient through the other ranks' sums
            check_gradients(_named(stock), _sharded(gradients, rank, world))
    with flathead_in_verl() as calls:
        got = megatron_outcome(rank, run, world, sequence_parallel)
    check_values(got, values[0], kept)
    check_gradients(_named(got), _sharded(gradients, rank, world))
    check_calls(calls, run)


_MEGATRON = {
    "lm_head.weight": "output_layer.weight",
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",  # whole only if the hidden states' gradient is
    "model.layers.0.input_layernorm.weight": "decoder.layers.0.input_layernorm.weight",
}


def _named(got: Outcome) -> dict[str, torch.Tensor]:
    return {name: got.gradients[theirs] for name, theirs in _MEGATRON.items()}


def _sharded(gradients: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    whole = {name: gradients[name] for name in _MEGATRON}
    return {name: g if "norm" in name else g.chunk(world)[rank] for name, g in whole.items()}


def megatron_less_memory(rank: int, world: int) -> None:
    """Flathead keeps no clone of the logits and no softmax, and writes the gradient over the logits."""
    run = Run(engine="megatron", **_WIDE)
    matrix = sum(lengths(0, run)) * run.vocab * 4 // world
    stock = megatron_outcome(rank, run, world, False)
    with flathead_in_verl():
        got = megatron_outcome(rank, run, world, False)
        fused = megatron_outcome(rank, Run(engine="megatron", fused="triton", chunk_size=16, **_WIDE), world, False)
    assert got.peak <= stock.peak - 3 * matrix, (got.peak / matrix, stock.peak / matrix)
    assert fused.largest < matrix


_TWO = ("log_probs", "entropy")
_MIXED, _NO_SQUARES = "mixed torch.Tensor and DTensor", "NotImplementedError"
_FSDP = {
    "remove padding": (Run(), None),
    "padding": (Run(remove_padding=False), None),
    "remove padding, chunks": (Run(chunk_size=5), None),
    "padding, chunks": (Run(remove_padding=False, chunk_size=5), None),
    "checkpointing, chunks": (Run(checkpointing=True, chunk_size=5), None),
    "padding, checkpointing, chunks": (Run(remove_padding=False, checkpointing=True, chunk_size=5), None),
    "compiled": (Run(compiled=True, keys=_TWO), None),
    "log_probs alone": (Run(keys=("log_probs",)), None),
    "a temperature for each sample": (Run(per_sample_temperature=True), None),
    "fused": (Run(fused="torch", keys=_TWO, tied=True), None),
    "fused, padding, chunks": (Run(fused="torch", keys=_TWO, tied=True, remove_padding=False, chunk_size=4), None),
    "fused, sum_pi_squared": (Run(fused="torch", tied=True), _NO_SQUARES),
    "fused, padding, sum_pi_squared": (Run(fused="torch", tied=True, remove_padding=False), _NO_SQUARES),
    "fused, untied": (Run(fused="torch", keys=_TWO), _MIXED),
    "fused, untied, padding, chunks": (Run(fused="torch", keys=_TWO, remove_padding=False, chunk_size=4), _MIXED),
    "fused by triton": (Run(fused="triton", keys=_TWO), "NVTX"),  # verl's kernel needs CUDA
}
_AUTOMODEL = {
    "remove padding": (Run(engine="automodel", keys=_TWO), None),
    "padding, chunks": (Run(engine="automodel", keys=_TWO, remove_padding=False, chunk_size=5), None),
    "sum_pi_squared": (Run(engine="automodel", chunk_size=5), "KeyError"),  # verl drops the key there
}
_INPLACE = "modified by an inplace operation"
_MEGATRON_RUNS = {
    "all": (Run(engine="megatron"), ""),
    "two": (Run(engine="megatron", keys=_TWO), ""),
    "chunks": (Run(engine="megatron", chunk_size=5), _INPLACE),
    "log_probs alone": (Run(engine="megatron", keys=("log_probs",), chunk_size=5), ""),
    "a temperature for each sample": (Run(engine="megatron", keys=_TWO, per_sample_temperature=True), ""),
    "fused, sum_pi_squared": (Run(engine="megatron", fused="triton"), _NO_SQUARES),
    "fused, chunks": (Run(engine="megatron", fused="triton", keys=_TWO, chunk_size=5), "NVTX"),
}

_ENGINES = {
    **{f"fsdp: {n}": partial(compare, run=run, stock_raises=raises) for n, (run, raises) in _FSDP.items()},
    **{f"automodel: {n}": partial(compare, run=run, stock_raises=raises) for n, (run, raises) in _AUTOMODEL.items()},
    **{f"megatron: {n}": partial(megatron, run=run, stock_raises=r) for n, (run, r) in _MEGATRON_RUNS.items()},
}
_FUSED_WIDE = Run(fused="torch", tied=True, chunk_size=16, **_WIDE)
ONE_RANK = {
    **_ENGINES,
    "fsdp: less memory": partial(less_memory, run=Run(**_WIDE), matrices=6),
    "fsdp: less memory, padding": partial(less_memory, run=Run(remove_padding=False, **_WIDE), matrices=6),
    "fsdp: less memory, fused": partial(less_memory, run=_FUSED_WIDE, matrices=4),
    "fsdp: bf16": no_worse_in_bf16,
    "megatron: less memory": megatron_less_memory,
}
_ON_TWO = (
    "fsdp: remove padding",
    "fsdp: padding, chunks",
    "fsdp: fused, padding, chunks",
    "fsdp: fused, sum_pi_squared",
    "fsdp: fused, untied",
    "automodel: sum_pi_squared",
    *(name for name in _ENGINES if name.startswith("megatron")),
)
TWO_RANKS = {
    **{name: _ENGINES[name] for name in _ON_TWO},
    **{
        f"megatron, sequence parallel: {n}": partial(megatron, run=run, stock_raises=r, sequence_parallel=True)
        for n, (run, r) in _MEGATRON_RUNS.items()
    },
    "megatron: less memory": megatron_less_memory,
}
