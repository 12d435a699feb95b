"""A Hugging Face Llama or Qwen3 as TorchTitan builds it: config, weights, and their names in both directions.

Import this module only after `_cpu.import_torchtitan()`.
"""

# TorchTitan is installed in an environment of its own, not where types are checked.
# pyright: reportMissingImports=false

from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

# Of each model type: model, block, rope, adapter of weights, parallelisation.
FAMILIES: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    "llama": (Llama3Model, Llama3TransformerBlock, ComplexRoPE, Llama3StateDictAdapter, parallelize_llama),
    "qwen3": (Qwen3Model, Qwen3TransformerBlock, CosSinRoPE, Qwen3StateDictAdapter, parallelize_qwen3),
}


def check_model(hf: Any, tp: int) -> None:
    """Errors: ValueError for a model that TorchTitan does not have, or whose sizes tensor parallel does not divide."""
    if hf.model_type not in FAMILIES:
        raise ValueError(
            f"model: the torchtitan engine takes {', '.join(FAMILIES)}, got {hf.model_type}; use strategy=fsdp"
        )
    rope = hf.rope_parameters["rope_type"]
    ropes = ("default", "llama3") if hf.model_type == "llama" else ("default",)
    if rope not in ropes:
        raise ValueError(f"model: the torchtitan engine takes rope_type={' or '.join(ropes)}, got {rope}")
    plain = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0.0}
    for name, wanted in {**plain, "use_sliding_window": False}.items():
        if (found := getattr(hf, name, wanted)) != wanted:
            raise ValueError(f"model: the torchtitan engine takes {name}={wanted}, got {found}; use strategy=fsdp")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(hf, name)) % tp:
            raise ValueError(f"tp({tp}) does not divide {name} {size}; set tensor_parallel_size to a divisor of it")


def model_config(hf: Any, attn_type: str) -> Any:
    """TorchTitan's configuration of the model that a Hugging Face configuration describes."""
    model, block, rope_class, *_ = FAMILIES[hf.model_type]
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    rope = {"dim": head_dim, "max_seq_len": hf.max_position_embeddings, "theta": hf.rope_parameters["rope_theta"]}
    if hf.rope_parameters["rope_type"] == "llama3":
        rope |= {
            "scaling": "llama",
            "scaling_factor": hf.rope_parameters["factor"],
            **{
                name: hf.rope_parameters[name]
                for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            },
        }

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps)

    def layer() -> Any:
        return block.Config(
            attention_norm=norm(hf.hidden_size),
            ffn_norm=norm(hf.hidden_size),
            attention=make_gqa_config(
                dim=hf.hidden_size,
                n_heads=hf.num_attention_heads,
                n_kv_heads=hf.num_key_value_heads,
                head_dim=head_dim,
                wqkv_param_init={},
                wo_param_init={},
                inner_attention=get_attention_config(attn_type),
                rope=rope_class.Config(**rope),
                qk_norm=norm(head_dim) if hf.model_type == "qwen3" else None,
            ),
            feed_forward=make_ffn_config(
                dim=hf.hidden_size, hidden_dim=hf.intermediate_size, w1_param_init={}, w2w3_param_init={}
            ),
        )

    return model.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        enable_weight_tying=hf.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size),
        norm=norm(hf.hidden_size),
        lm_head=Linear.Config(in_features=hf.hidden_size, out_features=hf.vocab_size),
        layers=[layer() for _ in range(hf.num_hidden_layers)],
    )
