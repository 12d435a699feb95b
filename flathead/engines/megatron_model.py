"""Hugging Face causal LMs as Megatron-Core models: shape and weights through mbridge, attention over packed sequences.

    embedding, head      weight S(0)@TP, padded to a multiple of TP      qkv, gate and up   weight S(0)@TP
    norms                replicated                                     proj, down         weight S(1)@TP

Import this module only after `_cpu.import_megatron()`.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from mbridge import AutoBridge
from mbridge.core.bridge import Bridge
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from flathead.engines.megatron_pack import positions_of

FAMILIES = ("llama", "qwen2", "qwen3")


class Norm(nn.RMSNorm):
    """RMSNorm under Megatron's signature. Under sequence parallelism its gradient is partial, which the mark says."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(nn.Module):
    """Causal attention of packed sequences, one by one; under context parallelism of this rank's two pieces of each.

    query (T, heads, D), key and value (T, kv heads, D), T the tokens of this rank -> (T, heads * D).
    """

    def __init__(self, *, config: TransformerConfig, softmax_scale: float | None, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.scale, self.cp_group = softmax_scale, pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> Tensor:
        ends = packed_seq_params.cu_seqlens_q.tolist()
        cp = self.cp_group.size()
        if cp > 1:
            key, value = (
                gather_from_sequence_parallel_region(states, group=self.cp_group).view(cp, *states.shape)
                for states in (key, value)
            )
        pieces = []
        for start, stop in pairwise(ends):
            mine = slice(start // cp, stop // cp)
            if cp == 1:
                pieces.append(self._attend(query[mine], key[mine], value[mine], None))
            else:
                k, v = (_in_order(states[:, mine]) for states in (key, value))
                position = positions_of(stop - start, cp, self.cp_group.rank(), query.device)
                seen = position[:, None] >= torch.arange(stop - start, device=query.device)
                pieces.append(self._attend(query[mine], k, v, seen))
        return torch.cat(pieces).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        heads_first = (states.transpose(0, 1)[None] for states in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            *heads_first,
            attn_mask=seen,
            is_causal=seen is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


def _in_order(states: Tensor) -> Tensor:
    """(cp, T / cp, ...), each rank's two pieces of a sequence -> (T, ...)."""
    first, second = states.chunk(2, dim=1)
    return torch.cat([first.flatten(0, 1), second.flip(0).flatten(0, 1)])


def check_model(hf_config: Any, tp: int, pp: int) -> None:
    """Errors: ValueError naming what this engine does not take."""
    family = hf_config.model_type
    if family not in FAMILIES:
        raise ValueError(f"model: the Megatron engine takes {', '.join(FAMILIES)}, got {family}; use strategy=fsdp")
    size = hf_config.intermediate_size
    if size % tp:
        fitting = ", ".join(str(n) for n in range(1, tp + 1) if size % n == 0)
        raise ValueError(
            f"tp({tp}) does not divide intermediate_size {size}; set tensor_model_parallel_size to one of {fitting}"
        )
    layers = hf_config.num_hidden_layers
    if layers % pp:
        fitting = ", ".join(str(n) for n in range(1, pp + 1) if layers % n == 0)
        raise ValueError(
            f"pp({pp}) does not divide num_hidden_layers {layers}; set pipeline_model_parallel_size to one of {fitting}"
        )
    rope = (getattr(hf_config, "rope_parameters", None) or {}).get("rope_type", "default")
    for name, value, expected in (
        ("rope_type", rope, "default"),
        ("hidden_act", hf_config.hidden_act, "silu"),
        ("attention_dropout", hf_config.attention_dropout, 0.0),
        ("mlp_bias", getattr(hf_config, "mlp_bias", False), False),
        ("use_sliding_window", getattr(hf_config, "use_sliding_window", False), False),
        ("attention_bias", family != "qwen2" and getattr(hf_config, "attention_bias", False), False),
    ):
        if value != expected:
            raise ValueError(
                f"model: the Megatron engine takes {name}={expected}, got {value}; use strategy=fsdp for this model"
            )


def bridge_of(hf_config: Any, dtype: torch.dtype, tp: int, **overrides: Any) -> Bridge:
    """mbridge's bridge of this model, with layers that need neither Transformer Engine nor CUDA.

    overrides: fields of Megatron's TransformerConfig.
    """
    hf_config = _with_padded_heads(hf_config, tp)
    hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]  # where transformers 5 keeps it
    stock = type(AutoBridge.from_config(hf_config, dtype=dtype))

    class LocalBridge(stock):  # type: ignore[misc,valid-type]  # its class is chosen by the model
        # Copies: mbridge changes the class's own table for tied weights, for every model after. The two names more
        # are those of norms that are not fused into the product behind them.
        _DIRECT_MAPPING = dict(stock._DIRECT_MAPPING) | {
            "output_layer.weight": "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight",
        }
        _MLP_MAPPING = dict(stock._MLP_MAPPING) | {
            "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"]
        }
        _OTHER_MAPPING: ClassVar = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}

        def _adjust_mapping_for_shared_weights(self) -> None: ...

        def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
            if ".pre_mlp_layernorm." in mcore_weights_name:
                return self._weight_name_mapping_mlp(mcore_weights_name)
            return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)

        def _get_gptmodel_args(self) -> dict[str, Any]:
            return {
                "vocab_size": hf_config.vocab_size,
                "max_sequence_length": hf_config.max_position_embeddings,
                "position_embedding_type": "rope",
                "rotary_base": hf_config.rope_theta,
            }

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
            layer: Any = get_gpt_layer_local_spec(qk_layernorm=self.config.qk_layernorm, normalization="RMSNorm")
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = PackedAttention
            if self.config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = Norm
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
            count = get_num_layers_to_build(self.config)
            return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=ModuleSpec(module=Norm))

    bridge = LocalBridge(hf_config, dtype=dtype, make_vocab_size_divisible_by=tp)
    bridge.set_extra_args(**overrides)
    return bridge


def _with_padded_heads(hf_config: Any, tp: int) -> Any:
    """The configuration with as many more groups of heads as Megatron needs, which shards whole groups.

    The weights of the groups more are zero, around them values and outputs too: they add nothing, their gradient is
    exactly zero, and so they stay.
    """
    config, groups = deepcopy(hf_config), hf_config.num_key_value_heads
    config.head_dim = head_dim(hf_config)
    config.num_key_value_heads = -(-groups // tp) * tp
    config.num_attention_heads = hf_config.num_attention_heads // groups * config.num_key_value_heads
    return config


def head_dim(hf_config: Any) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def _heads_dim(name: str, config: Any) -> tuple[int, int] | None:
    """Which dimension of a weight is heads x channels, and how long it is in this configuration; None: none is."""
    parts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    parts |= {"v_proj": parts["k_proj"], "o_proj": parts["q_proj"]}
    part = name.split(".")[-2] if "self_attn." in name else ""
    return (1 if part == "o_proj" else 0, parts[part] * head_dim(config)) if part in parts else None


def with_padded_heads(weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Weights by Hugging Face name, zeros put behind their heads up to those of the padded configuration."""

    def padded(name: str, tensor: Tensor) -> Tensor:
        if (found := _heads_dim(name, config)) is None:
            return tensor
        dim, size = found
        missing = list(tensor.shape)
        missing[dim] = size - missing[dim]
        return torch.cat([tensor, tensor.new_zeros(missing)], dim) if missing[dim] else tensor

    return {name: padded(name, tensor) for name, tensor in weights.items()}


def build(bridge: Any, weights: dict[str, Tensor], padding_idx: int | None) -> GPTModel:
    """This rank's part of the model, filled from `weights` under their Hugging Face names. All ranks take part;
    the weights of each tensor-parallel group's first rank count. padding_idx: of the model's embedding."""
    provider = bridge._model_provider([])
    model = provider(pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage())
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if padding_idx is not None and hasattr(model, "embedding"):
        model.embedding.word_embeddings.register_forward_hook(partial(_untrained, padding_idx))
    padded = with_padded_heads(weights, bridge.hf_config)
    bridge._get_safetensor_io = lambda path: _InMemory(padded)
    bridge.dtype = torch.float32  # it would round the weights to the computing dtype on their way
    with torch.no_grad():
        bridge.load_weights([model], "")
    return model


def _untrained(padding_idx: int, embedding: Any, arguments: tuple[Tensor], output: Tensor) -> Tensor:
    """As in torch.nn.Embedding: what is looked up for the padding token gives its weight no gradient."""
    is_padding_BS = arguments[0] == padding_idx
    if not bool(is_padding_BS.any()):
        return output
    if embedding.reduce_scatter_embeddings:  # output (S / tp, B, H), this rank's part of the sequence
        tp, rank = embedding.tp_group.size(), embedding.tp_group.rank()
        is_padding_BS = is_padding_BS.T.chunk(tp)[rank]
    return torch.where(is_padding_BS[..., None], output.detach(), output)


class _InMemory:
    """Stands where mbridge expects a directory of safetensors."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def load_some_hf_weight(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self.weights[name] for name in names}


def exported(bridge: Bridge, model: GPTModel, hf_config: Any) -> Iterator[tuple[str, Tensor]]:
    """Every weight, whole, on every rank, under its Hugging Face name; tied ones once. All ranks take part.

    hf_config: of the model that came, without padded heads."""
    seen: set[str] = set()
    with torch.no_grad():
        for name, tensor in bridge.export_weights([model]):
            if name not in seen:
                seen.add(name)
                if (found := _heads_dim(name, hf_config)) is not None:
                    tensor = tensor.narrow(found[0], 0, found[1]).contiguous()
                yield name, tensor.detach()
