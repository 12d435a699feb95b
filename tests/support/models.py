"""Tiny Hugging Face causal LMs with random weights, big enough that every part has something to do."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextConfig, {"final_logit_softcapping": 2.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
    "cohere2": (Cohere2Config, {"logit_scale": 0.25}),
    "granite": (GraniteConfig, {"logits_scaling": 3.0}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "mixtral": (MixtralConfig, {"output_router_logits": True, "num_local_experts": 4}),
}


def tiny(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The named model: 2 layers, hidden 64, 512 tokens of vocabulary, in fp32 and training mode, sharpened weights."""
    torch.manual_seed(seed)
    kind, special = CONFIGS[name]
    shape = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = kind(**{**shape, "initializer_range": 0.2, **special, **overrides})
    return AutoModelForCausalLM.from_config(config).train()
