"""The VeOmni engine: what it refuses, and what the contract's models do not have."""

from typing import Any

import pytest
import torch

from flathead.config import VeOmniEngineConfig
from flathead.engines._cpu import import_veomni
from flathead.engines.veomni import VeOmniEngine, check_family, check_layout
from tests.engine_contract.reference import OPTIM, STATS, TEMPERATURE, loss_fn, naive_stats, whole_batch
from tests.support.models import tiny

import_veomni()


def engine(model: Any, **options: Any) -> VeOmniEngine:
    return VeOmniEngine(model, VeOmniEngineConfig(**{"dtype": "float32", **options}), OPTIM)


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        ({"ulysses_parallel_size": 0}, 2, r"engine\.ulysses_parallel_size 0 does not divide the 2 processes"),
        ({"ulysses_parallel_size": 2}, 3, r"engine\.ulysses_parallel_size 2 does not divide the 3 processes; start a"),
        (
            {"ulysses_parallel_size": 2, "fsdp_size": 3},
            8,
            r"engine\.fsdp_size 3 does not divide the 4 data-parallel ranks \(8 processes / ulysses_parallel_size 2\)",
        ),
        ({"fsdp_size": 0}, 4, r"engine\.fsdp_size 0 does not divide the 4 data-parallel ranks"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(VeOmniEngineConfig(**layout), world)
    check_layout(VeOmniEngineConfig(ulysses_parallel_size=2, fsdp_size=2), 8)


@pytest.mark.parametrize(
    ("family", "changes", "ulysses", "message"),
    [
        ("gemma2", {}, 1, "takes llama, qwen2, qwen3, got gemma2; use strategy=fsdp"),
        (
            "llama",
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
            2,
            r"ulysses_parallel_size\(2\) does not divide 9 attention heads and 3 key-value heads; set it to one of 1$",
        ),
        (
            "qwen3",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            r"ulysses_parallel_size\(4\) does not divide 12 attention heads and 3 key-value heads; .* one of 1, 3$",
        ),
    ],
)
def test_models_that_cannot_be_shared_are_refused(
    family: str, changes: dict[str, Any], ulysses: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_family(tiny(family, **changes), ulysses)
    for fine in ("llama", "qwen2", "qwen3"):
        check_family(tiny(fine), 4)  # of two key-value heads each rank has one, twice


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a Hugging Face causal LM"):
        engine(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="ulysses_parallel_size 2 does not divide the 1 processes"):
        engine(tiny("llama"), ulysses_parallel_size=2)
    with pytest.raises(ValueError, match=r"tensor_parallel_size: expected 1, got 2; .* fsdp, megatron, torchtitan or"):
        engine(tiny("llama"), tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        ("llama", {"mlp_bias": True, "attention_bias": True}),
        ("qwen3", {"head_dim": 32, "rms_norm_eps": 1e-2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ],
)
def test_the_model_is_the_configured_one(family: str, changes: dict[str, Any]) -> None:
    """Statistics and gradient norm of Hugging Face's model, which a model with the defaults does not have."""
    model, batch = tiny(family, **changes), whole_batch()
    expected = naive_stats(model.eval(), batch)
    gradients = torch.autograd.grad((batch.weight_N * loss_fn(expected, batch)[0]).sum(), list(model.parameters()))
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    default = naive_stats(tiny(family), batch)
    assert (default.log_prob - expected.log_prob).abs().max() > 1e-3
    ours = engine(model)
    stats = ours.token_stats(batch, STATS, temperature=TEMPERATURE)
    for name in STATS:
        torch.testing.assert_close(getattr(stats, name), getattr(expected, name).detach(), rtol=2e-5, atol=2e-5)
    got = ours.train_step(batch, loss_fn, STATS, temperature=TEMPERATURE)
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_importing_it_leaves_hugging_faces_loss_as_it_was() -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    engine(tiny("llama"))
    assert LOSS_MAPPING["ForCausalLM"] is ForCausalLMLoss
