"""The TorchTitan engine: what it refuses, and what the contract's models do not have; the contract has the numbers."""

from typing import Any

import pytest
import torch

from flathead.config import TorchtitanEngineConfig
from flathead.engines._cpu import import_torchtitan
from flathead.engines.torchtitan import TorchTitanEngine, check_layout
from tests.engine_contract.reference import OPTIM, STATS, TEMPERATURE, loss_fn, naive_stats, whole_batch
from tests.support.models import tiny

import_torchtitan()

from flathead.engines import torchtitan_model  # noqa: E402  # after import_torchtitan

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def engine(model: Any, **options: Any) -> TorchTitanEngine:
    return TorchTitanEngine(model, TorchtitanEngineConfig(**{"dtype": "float32", **options}), OPTIM)


@pytest.mark.parametrize(
    ("options", "world", "message"),
    [
        ({"tensor_parallel_size": 0}, 2, r"engine\.tensor_parallel_size: expected at least 1, got 0"),
        ({"context_parallel_size": -1}, 2, r"engine\.context_parallel_size: expected at least 1, got -1"),
        ({"data_parallel_replicate_size": 0}, 2, r"data_parallel_replicate_size: expected at least 1, got 0"),
        (
            {"tensor_parallel_size": 2, "context_parallel_size": 2},
            6,
            r"data_parallel_replicate_size 1 x tensor_parallel_size 2 x context_parallel_size 2 = 4 does not divide "
            r"the 6 processes; start a multiple of 4",
        ),
        (
            {"tensor_parallel_size": 2, "data_parallel_shard_size": 4},
            4,
            r"data_parallel_shard_size: expected -1 or 2, the ranks that .* = 2 leaves of 4 processes, got 4",
        ),
        ({"spmd_backend": "spmd_types"}, 2, r"spmd_backend: expected partial_dtensor on 2 processes, got spmd_types"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(options: dict[str, Any], world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(TorchtitanEngineConfig(**options), world)
    check_layout(TorchtitanEngineConfig(tensor_parallel_size=2, data_parallel_shard_size=2), 4)


@pytest.mark.parametrize("attn_type", ["varlen", "flex_flash"])
def test_attention_that_needs_cuda_is_refused_without_it(attn_type: str) -> None:
    if torch.cuda.is_available():
        check_layout(TorchtitanEngineConfig(attn_type=attn_type), 1)
        return
    with pytest.raises(ValueError, match=f"attn_type: expected flex on a CPU, got {attn_type}, which needs CUDA"):
        engine(tiny("llama"), attn_type=attn_type)


@pytest.mark.parametrize(
    ("family", "changes", "tp", "message"),
    [
        ("qwen2", {}, 1, "takes llama, qwen3, got qwen2; use strategy=fsdp"),
        ("gemma2", {}, 1, "takes llama, qwen3, got gemma2; use strategy=fsdp"),
        ("llama", {"intermediate_size": 95}, 2, r"tp\(2\) does not divide intermediate_size 95"),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}, 2, "num_attention_heads 9"),
        ("qwen3", {"num_key_value_heads": 1}, 2, "does not divide num_key_value_heads 1"),
        ("llama", {"hidden_act": "gelu"}, 1, "takes hidden_act=silu, got gelu"),
        ("llama", {"mlp_bias": True}, 1, "takes mlp_bias=False, got True"),
        ("qwen3", {"attention_bias": True}, 1, "takes attention_bias=False, got True"),
        ("llama", {"attention_dropout": 0.1}, 1, r"takes attention_dropout=0\.0, got 0\.1"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4}, 1, "takes use_sliding_window=False, got True"),
        ("qwen3", {"rope_parameters": LLAMA3_ROPE}, 1, "takes rope_type=default, got llama3"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            1,
            "takes rope_type=default or llama3, got linear",
        ),
    ],
)
def test_models_that_would_come_out_wrong_are_refused(
    family: str, changes: dict[str, Any], tp: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        torchtitan_model.check_model(tiny(family, **changes).config, tp)
    for fine in ("llama", "qwen3"):
        torchtitan_model.check_model(tiny(fine).config, 2)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-2}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "head_dim": 32}),
    ],
)
def test_the_model_is_the_configured_one(family: str, changes: dict[str, Any]) -> None:
    """Scaled and other rotary embeddings, another eps, heads wider than hidden / heads: statistics and gradient norm of
    Hugging Face's model, which a model with the defaults does not have."""
    model, batch = tiny(family, **changes), whole_batch()
    expected = naive_stats(model, batch)
    gradients = torch.autograd.grad((batch.weight_N * loss_fn(expected, batch)[0]).sum(), list(model.parameters()))
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    default = naive_stats(tiny(family), batch)
    assert (default.log_prob - expected.log_prob).abs().max() > 1e-3
    ours = engine(model)
    stats = ours.token_stats(batch, STATS, temperature=TEMPERATURE)
    for name in STATS:
        torch.testing.assert_close(getattr(stats, name), getattr(expected, name).detach(), rtol=1e-5, atol=1e-5)
    got = ours.train_step(batch, loss_fn, STATS, temperature=TEMPERATURE)
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_other_backend_runs_in_one_process() -> None:
    got = [
        engine(tiny("qwen3"), spmd_backend=backend).train_step(whole_batch(), loss_fn, STATS, temperature=TEMPERATURE)
        for backend in ("partial_dtensor", "spmd_types")
    ]
    assert got[1] == pytest.approx(got[0], rel=1e-6)
