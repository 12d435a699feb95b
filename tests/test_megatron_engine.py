"""The Megatron engine: what it refuses, how it packs, what it saves. The numbers are the engine contract's."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from flathead.batch import PackedBatch
from flathead.config import McoreEngineConfig
from flathead.engines._cpu import import_megatron, on_this_device
from flathead.engines.megatron_pack import Pack
from tests.support.models import tiny

import_megatron()

from flathead.engines import megatron_model  # noqa: E402  # after import_megatron
from flathead.engines.megatron import check_layout  # noqa: E402


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        ({"tensor_model_parallel_size": 0}, 2, r"engine\.tensor_model_parallel_size: expected at least 1, got 0"),
        ({"pipeline_model_parallel_size": -1}, 2, r"engine\.pipeline_model_parallel_size: expected at least 1, got -1"),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
            6,
            r"tensor_model_parallel_size 2 x pipeline_model_parallel_size 1 x context_parallel_size 2 = 4 does not "
            r"divide the 6 processes; start a multiple of 4",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(McoreEngineConfig(**layout), world)
    check_layout(McoreEngineConfig(tensor_model_parallel_size=2), 4)


@pytest.mark.parametrize(
    ("family", "changes", "tp", "pp", "message"),
    [
        ("gemma2", {}, 1, 1, "takes llama, qwen2, qwen3, got gemma2; use strategy=fsdp"),
        ("llama", {"intermediate_size": 95}, 2, 1, r"tp\(2\) does not divide intermediate_size 95; .* one of 1$"),
        ("llama", {"num_hidden_layers": 6}, 1, 4, r"pp\(4\) does not divide num_hidden_layers 6; .* one of 1, 2, 3$"),
        ("llama", {"hidden_act": "gelu"}, 1, 1, "takes hidden_act=silu, got gelu"),
        ("llama", {"mlp_bias": True}, 1, 1, "takes mlp_bias=False, got True"),
        ("llama", {"attention_bias": True}, 1, 1, "takes attention_bias=False, got True"),
        ("llama", {"attention_dropout": 0.1}, 1, 1, r"takes attention_dropout=0\.0, got 0\.1"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            1,
            1,
            "takes rope_type=default, got linear",
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4}, 1, 1, "takes use_sliding_window=False, got True"),
    ],
)
def test_models_that_would_come_out_wrong_are_refused(
    family: str, changes: dict[str, Any], tp: int, pp: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        megatron_model.check_model(tiny(family, **changes).config, tp, pp)
    for fine in ("llama", "qwen2", "qwen3"):
        megatron_model.check_model(tiny(fine).config, 2, 2)


@pytest.mark.parametrize("lengths", [[1], [5], [1, 2, 3], [4, 8], [7, 1, 9, 2]])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_every_token_is_on_one_rank_and_the_padding_fits(lengths: list[int], cp: int, multiple: int) -> None:
    batch = PackedBatch.from_sequences([[9]] * len(lengths), [list(range(n - 1)) for n in lengths])
    packs = [Pack.of(batch, multiple, cp, rank) for rank in range(cp)]
    rows = torch.cat([pack.rows for pack in packs])
    assert sorted(rows.tolist()) == list(range(sum(lengths)))
    for pack in packs:
        assert len(pack.source_L) % multiple == 0 and pack.ends[-1] == cp * len(pack.source_L)
        pieces = 2 * cp if cp > 1 else 1
        assert all((stop - start) % pieces == 0 for start, stop in pairwise(pack.ends))
        kept = pack.kept(pack.source_L)
        assert kept.tolist() == (pack.rows.tolist() or [-1])
        assert torch.equal(pack.local(batch.input_ids_N)[pack.source_L >= 0], batch.input_ids_N[pack.rows])


def test_the_device_is_the_cpu_only_inside() -> None:
    if torch.cuda.is_available():
        return  # nothing is changed there
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with on_this_device(), on_this_device():
        here = torch.zeros(2, device="cuda", pin_memory=True)
        assert here.device.type == here.cuda().device.type == here.to("cuda:0").device.type == "cpu"
        assert here.type() == "torch.cuda.FloatTensor" and torch.cuda.current_device() == torch.device("cpu")
    assert here.type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_padded_heads_are_zeros_behind_the_models_own() -> None:
    model = tiny("qwen2", num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    weights = dict(model.named_parameters())
    config = megatron_model._with_padded_heads(model.config, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 16)
    padded = megatron_model.with_padded_heads({name: w.detach() for name, w in weights.items()}, config)
    for name, tensor in padded.items():
        own = weights[name]
        if ".self_attn." not in name or name.endswith("norm.weight"):
            assert torch.equal(tensor, own)
            continue
        dim, heads = (1, 8) if "o_proj" in name else (0, 8 if "q_proj" in name else 4)
        assert tensor.shape[dim] == 16 * heads
        assert torch.equal(tensor.narrow(dim, 0, own.shape[dim]), own)
        assert not tensor.narrow(dim, own.shape[dim], tensor.shape[dim] - own.shape[dim]).any()
