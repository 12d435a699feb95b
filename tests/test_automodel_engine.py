"""The NeMo Automodel engine: what it refuses, and what the contract's models do not have."""

from typing import Any

import pytest
import torch

from flathead.config import AutomodelEngineConfig
from flathead.engines._cpu import import_automodel
from flathead.engines.automodel import AutomodelEngine, check_heads, check_layout
from tests.engine_contract.reference import OPTIM, STATS, TEMPERATURE, loss_fn, naive_stats, whole_batch
from tests.support.models import tiny

import_automodel()


def engine(model: Any, **options: Any) -> AutomodelEngine:
    return AutomodelEngine(model, AutomodelEngineConfig(**{"dtype": "float32", **options}), OPTIM)


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        ({"tp_size": 0}, 2, r"engine\.tp_size: expected at least 1, got 0"),
        ({"dp_replicate_size": -1}, 2, r"engine\.dp_replicate_size: expected at least 1, got -1"),
        (
            {"tp_size": 2, "dp_replicate_size": 2},
            6,
            "tp_size 2 x dp_replicate_size 2 = 4 does not divide the 6 processes; start a multiple of 4",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(AutomodelEngineConfig(**layout), world)
    check_layout(AutomodelEngineConfig(tp_size=2), 4)


@pytest.mark.parametrize(
    ("family", "changes", "tp", "message"),
    [
        ("gemma2", {}, 2, "expected a model of llama, qwen2, qwen3, got gemma2"),
        ("llama", {"vocab_size": 511}, 2, r"tp\(2\) does not divide vocab_size 511"),
        (
            "llama",
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
            2,
            r"tp_size\(2\) does not divide num_attention_heads 9, as NeMo Automodel needs; set it to 1, or use",
        ),
        ("qwen3", {"num_key_value_heads": 2}, 4, r"tp_size\(4\) does not divide num_key_value_heads 2, .* 1, 2, or"),
    ],
)
def test_models_that_tensor_parallel_cannot_share_are_refused(
    family: str, changes: dict[str, Any], tp: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_heads(tiny(family, **changes), tp)
    check_heads(tiny(family, **changes), 1)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a Hugging Face causal LM"):
        engine(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="tp_size 2 x dp_replicate_size 1 = 2 does not divide the 1 processes"):
        engine(tiny("llama"), tp_size=2)
    with pytest.raises(ValueError, match=r"cp_size: expected 1, got 2; of the engines here megatron or torchtitan"):
        engine(tiny("llama"), cp_size=2)
    with pytest.raises(ValueError, match=r"pp_size: expected 1, got 2; of the engines here megatron can have more"):
        engine(tiny("llama"), pp_size=2)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3", {}),
        ("granite", {}),
        ("mixtral", {"output_router_logits": False}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ],
)
def test_any_hugging_face_causal_lm_without_tensor_parallel(family: str, changes: dict[str, Any]) -> None:
    model, batch = tiny(family, **changes), whole_batch()
    expected = naive_stats(model.eval(), batch)
    gradients = torch.autograd.grad((batch.weight_N * loss_fn(expected, batch)[0]).sum(), list(model.parameters()))
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    ours = engine(model)
    stats = ours.token_stats(batch, STATS, temperature=TEMPERATURE)
    for name in STATS:
        torch.testing.assert_close(getattr(stats, name), getattr(expected, name).detach(), rtol=2e-5, atol=2e-5)
    got = ours.train_step(batch, loss_fn, STATS, temperature=TEMPERATURE)
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-4)
