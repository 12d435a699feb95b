"""VeOmni: its models (Llama, Qwen2, Qwen3), its FSDP2 (HSDP too) and its Ulysses sequence parallel.

Statistics are computed where the head stood in the model's forward. Under Ulysses a rank has a contiguous part of the
packed micro-batch; its attention exchanges the sequence for heads.
"""

# VeOmni is installed in an environment of its own, not where types are checked.
# pyright: reportMissingImports=false

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flathead.config import OptimConfig, VeOmniEngineConfig
from flathead.config_checks import check_engine
from flathead.engines._cpu import import_veomni, quiet_veomni
from flathead.engines.base import (
    MicroStep,
    SavedForm,
    join_default_group,
    local_device,
    over_context,
    rows_of_part,
)
from flathead.engines.packed_attention import use_packed_attention
from flathead.engines.sharded import HeadForward, HuggingFaceEngine, check_packing, load_whole, weights_of_rank_0
from flathead.lm_head import HuggingFaceModel, check_model

_FAMILIES = ("llama", "qwen2", "qwen3")


class VeOmniEngine(HuggingFaceEngine):
    """A Hugging Face causal LM (Llama, Qwen2, Qwen3) as VeOmni's, on all processes of the default group.

    The given model is read (rank 0's weights count) and can be forgotten; fp32 masters, computed with in
    `config.dtype`. Errors: ValueError for sizes that do not divide and models this engine does not take;
    ModuleNotFoundError without VeOmni.
    """

    config: VeOmniEngineConfig

    def __init__(self, model: HuggingFaceModel, config: VeOmniEngineConfig, optim: OptimConfig) -> None:
        check_engine("engine", config)
        world = dist.get_world_size() if dist.is_initialized() else 1
        check_layout(config, world)
        import_veomni()
        check_model(model)
        self.cp_size = config.ulysses_parallel_size
        check_family(model, self.cp_size)
        self.config, self.optim = config, optim
        self.device = local_device()
        self.saved_form = SavedForm.of(model)
        check_packing(model.to(self.device), packed={})
        join_default_group(self.device)
        self.dp_size = world // self.cp_size
        self._parallel = self._parallel_state()
        if world > 1:
            self.dp_rank, self.dp_group = self._parallel.dp_rank, self._parallel.dp_group
            self.loss_scale = float(world)  # FSDP2 averages gradients over data- and sequence-parallel ranks
        weights = weights_of_rank_0(model, self.device)
        with self._parallelism(), quiet_veomni():
            self.model = self._built(model, world)
            load_whole(self.model, weights)
        self._packed = self.cp_size > 1 or use_packed_attention(self.model)
        self.model.forward = HeadForward(self.model, self.model.forward)
        self._make_optimizer()

    def _parallel_state(self) -> Any:
        from veomni.distributed.parallel_state import init_parallel_state

        shard = self.dp_size if self.config.fsdp_size == -1 else self.config.fsdp_size
        return init_parallel_state(
            dp_size=self.dp_size,
            dp_replicate_size=self.dp_size // shard,
            dp_shard_size=shard,
            ulysses_size=self.cp_size,
            dp_mode="fsdp2",
            device_type=self.device.type,
            name=None,  # the state is this engine's, not the process's
        )

    def _parallelism(self) -> AbstractContextManager[Any]:
        from veomni.distributed.parallel_state import use_parallel_state

        return use_parallel_state(self._parallel)

    def _built(self, model: HuggingFaceModel, world: int) -> Any:
        """VeOmni's model of the same architecture, its weights not yet loaded, sharded."""
        from veomni.arguments.arguments_types import MixedPrecisionConfig, OpsImplementationConfig
        from veomni.distributed.torch_parallelize import build_parallelize_model
        from veomni.models import build_foundation_model

        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        eager = ("moe", "cross_entropy_loss", "rms_norm", "swiglu_mlp", "rotary_pos_emb", "load_balancing_loss")
        gated = ("rms_norm_gated", "causal_conv1d", "chunk_gated_delta_rule")
        built = build_foundation_model(
            config,
            torch_dtype="float32",
            init_device="meta" if world > 1 else self.device.type,
            ops_implementation=OpsImplementationConfig(
                attn_implementation="flash_attention_2" if self.cp_size > 1 else "sdpa",
                **{f"{op}_implementation": "eager" for op in (*eager, *gated)},
            ),
        )
        if world == 1:  # which VeOmni does not parallelize
            if self.config.gradient_checkpointing:
                built.gradient_checkpointing_enable({"use_reentrant": False})
            return built.to(self.device)
        return build_parallelize_model(
            built,
            init_device="meta",
            mixed_precision=MixedPrecisionConfig(
                enable=self.config.dtype != "float32", param_dtype=self.config.dtype, reduce_dtype="float32"
            ),
            enable_gradient_checkpointing=self.config.gradient_checkpointing,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dp_group is not None or self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)

    def run(self, steps: list[MicroStep]) -> list[dict[str, Tensor]]:
        with self._parallelism():
            results = super().run(steps)
        group = self._parallel.ulysses_group if self.cp_size > 1 else None
        return [over_context(r, s, self._rows(s), group) for r, s in zip(results, steps, strict=True)]

    def forward(self, step: MicroStep) -> dict[str, Tensor]:
        if self.cp_size == 1:
            return super().forward(step)
        batch, size = step.batch, self._part(step)
        padding = size * self.cp_size - len(batch.input_ids_N)
        part = slice(self._parallel.ulysses_rank * size, (self._parallel.ulysses_rank + 1) * size)
        # What pads the batch is sequences of one token.
        ends = (*batch.cu_seqlens, *range(batch.cu_seqlens[-1] + 1, size * self.cp_size + 1))
        ends_S = torch.tensor(ends, dtype=torch.int32, device=self.device)
        longest = max(batch.lengths)
        rows = self._rows(step)
        head_fn = self._head_fn(step.of_rows(rows))
        return self.model(
            head_fn=lambda hidden_1NH: head_fn(hidden_1NH[:, : max(len(rows), 1)]),
            input_ids=torch.nn.functional.pad(batch.input_ids_N, (0, padding))[None, part],
            position_ids=torch.nn.functional.pad(batch.position_ids_N, (0, padding))[None, part],
            use_cache=False,
            cu_seq_lens_q=ends_S,
            cu_seq_lens_k=ends_S,
            max_length_q=longest,
            max_length_k=longest,
        )

    def _part(self, step: MicroStep) -> int:
        """How many entries each rank of a Ulysses group has of a micro-batch and what pads it."""
        return -(-len(step.batch.input_ids_N) // self.cp_size)

    def _rows(self, step: MicroStep) -> Tensor:
        return rows_of_part(step, self._parallel.ulysses_rank if self.cp_size > 1 else 0, self._part(step))


def check_family(model: HuggingFaceModel, ulysses: int) -> None:
    """Errors: ValueError for a model that VeOmni does not have, or whose heads `ulysses` ranks cannot share."""
    config = model.config
    if config.model_type not in _FAMILIES:
        raise ValueError(
            f"model: the veomni engine takes {', '.join(_FAMILIES)}, got {config.model_type}; use strategy=fsdp"
        )
    if ulysses == 1:
        return
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if heads % ulysses or (kv % ulysses and ulysses % kv):
        fitting = [n for n in range(1, ulysses) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
        raise ValueError(
            f"ulysses_parallel_size({ulysses}) does not divide {heads} attention heads and {kv} key-value heads; "
            f"set it to one of {', '.join(map(str, fitting))}"
        )


def check_layout(config: VeOmniEngineConfig, world: int, key: str = "engine") -> None:
    """Errors: ValueError where the sizes do not divide the processes; `key`: where the configuration stands."""
    sp, shard = config.ulysses_parallel_size, config.fsdp_size
    if sp < 1 or world % sp:
        raise ValueError(
            f"{key}.ulysses_parallel_size {sp} does not divide the {world} processes; start a multiple of {sp}"
        )
    dp = world // sp
    if shard != -1 and (shard < 1 or dp % shard):
        raise ValueError(
            f"{key}.fsdp_size {shard} does not divide the {dp} data-parallel ranks ({world} processes / "
            f"ulysses_parallel_size {sp}); set it to -1 for all of them"
        )
