"""Tensor parallel for the Llama, Qwen2 and Qwen3 families of Hugging Face models, with a vocabulary-sharded head.

    embedding            weight S(0)@TP, output replicated       q, k, v, gate, up   weight S(0)@TP, output S(-1)
    head                 weight S(0)@TP                          o, down             weight S(1)@TP, output replicated
    q_norm, k_norm       replicated, applied to this rank's heads: their gradient is summed over TP
    other norms          replicated, applied to replicated rows: every rank has their whole gradient
    attention            replicated as a whole where its heads do not divide: every rank computes all of it

Errors: ValueError for another family, for a part of a layer not named here, and where the sizes do not divide.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from flathead.lm_head import HuggingFaceModel

_FAMILIES = ("llama", "qwen2", "qwen3")
_COLUMN_WISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROW_WISE = ("self_attn.o_proj", "mlp.down_proj")
_PER_HEAD = ("self_attn.q_norm", "self_attn.k_norm")
_REPLICATED = ("input_layernorm", "post_attention_layernorm")


def check_tensor_parallel(model: HuggingFaceModel, tp: int) -> None:
    config = model.config
    if config.model_type not in _FAMILIES:
        raise ValueError(
            f"tensor_parallel_size {tp}: expected a model of {', '.join(_FAMILIES)}, got {config.model_type}; "
            "set it to 1"
        )
    for name in ("intermediate_size", "vocab_size"):
        size = getattr(config, name)
        if size % tp:
            fitting = ", ".join(str(n) for n in range(1, tp + 1) if size % n == 0)
            raise ValueError(f"tp({tp}) does not divide {name} {size}; set tensor_parallel_size to one of {fitting}")
    known = {*_COLUMN_WISE, *_ROW_WISE, *_PER_HEAD, *_REPLICATED}
    for name, _ in model.model.layers[0].named_parameters():
        if name.rpartition(".")[0] not in known:
            raise ValueError(f"tensor_parallel_size {tp}: {name} of {type(model).__name__} has no place in the plan")


def plan_of(model: HuggingFaceModel, tp: int) -> dict[str, Any]:
    """How each module of the (checked) model is divided, `*` being every layer."""
    whole = Replicate()
    styles: dict[str, Any] = {
        **dict.fromkeys(_COLUMN_WISE, ColwiseParallel()),
        **dict.fromkeys(_ROW_WISE, RowwiseParallel()),
        # Heads are dimension 2 of (batch, token, head, channel): "sequence" is torch's name, not what it does here.
        **dict.fromkeys(_PER_HEAD, SequenceParallel(sequence_dim=2, use_local_output=True)),
    }
    if not _heads_divide(model.config, tp):
        styles = {name: style for name, style in styles.items() if not name.startswith("self_attn.")}
    present = dict(model.model.layers[0].named_modules()).keys()
    return {
        **{f"model.layers.*.{name}": style for name, style in styles.items() if name in present},
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "lm_head": ColwiseParallel(output_layouts=whole),
    }


def shard_over_tp(model: HuggingFaceModel, mesh: DeviceMesh) -> None:
    """Replaces the weights of the (checked) model by their DTensor shards over the one-dimensional mesh."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(model, mesh, plan_of(model, mesh.size()))
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def _heads_divide(config: Any, tp: int) -> bool:
    return config.num_attention_heads % tp == 0 and config.num_key_value_heads % tp == 0
