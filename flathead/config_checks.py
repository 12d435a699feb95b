"""Values of the configuration that make no sense, alone or with one another, are refused here, at start-up.

Every error is a ValueError that names the key, what was expected, what came, and where it helps what to do.
"""

import math

from flathead.config import (
    CONFIG_NAMES,
    KL_TYPES,
    STRATEGIES,
    ActorConfig,
    ActorRolloutRefConfig,
    AutomodelEngineConfig,
    DataConfig,
    EngineConfig,
    EntropyChunkingConfig,
    TorchtitanEngineConfig,
    TrainConfig,
    VeOmniEngineConfig,
    engines_of,
)

_CHUNK_SIZE = EntropyChunkingConfig.entropy_from_logits_chunk_size
# Sizes that a package, or its engine here, cannot have, and the engines that can.
_ELSEWHERE: dict[type[EngineConfig], dict[str, str]] = {
    VeOmniEngineConfig: {"tensor_parallel_size": "fsdp, megatron, torchtitan or automodel"},
    TorchtitanEngineConfig: {"pipeline_parallel_size": "megatron"},
    AutomodelEngineConfig: {"cp_size": "megatron or torchtitan", "pp_size": "megatron"},
}


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
    for name, engines in _ELSEWHERE.get(type(engine), {}).items():
        if (size := getattr(engine, name)) != 1:
            raise ValueError(f"{key}.{name}: expected 1, got {size}; of the engines here {engines} can have more")
    if isinstance(engine, TorchtitanEngineConfig):
        _one_of(f"{key}.attn_type", engine.attn_type, ("flex", "flex_flash", "varlen"))
        if engine.attn_type == "varlen" and engine.context_parallel_size > 1:
            raise ValueError(
                f"{key}.attn_type: expected flex with context_parallel_size {engine.context_parallel_size}, got varlen"
            )
        # TorchTitan 0.3.0 has a third, full_dtensor, whose models take only inputs that are DTensors themselves.
        _one_of(f"{key}.spmd_backend", engine.spmd_backend, ("partial_dtensor", "spmd_types"))
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
                f"actor@actor_rollout_ref.actor={group}_actor ref@actor_rollout_ref.ref={group}_ref "
                f"or --config-name {CONFIG_NAMES[wanted]}"
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
    name = "clip_ratio" if actor.clip_ratio_low is None else "clip_ratio_low"
    if getattr(actor, name) > 1:
        raise ValueError(f"{key}.{name}: expected at most 1, since a ratio is positive, got {getattr(actor, name)}")
    if actor.clip_ratio_c is not None and not (1 < actor.clip_ratio_c < math.inf):
        raise ValueError(
            f"{key}.clip_ratio_c: expected more than 1, or null for no dual clip, got {actor.clip_ratio_c}"
        )
    if actor.clip_ratio_c is not None and actor.policy_loss.loss_mode == "cispo":
        raise ValueError(f"{key}.clip_ratio_c: expected null with loss_mode={actor.policy_loss.loss_mode}")


def check(config: TrainConfig, given: set[str]) -> None:
    """Raises ValueError for a value that makes no sense, alone or with the others, and for one that nothing reads.

    given: the full keys that were set by hand. What the reference inherits and has no use for is removed.
    """
    arr, data, trainer = config.actor_rollout_ref, config.data, config.trainer
    for name, least in (("steps", 1), ("save_freq", 1), ("test_freq", 0), ("max_ckpt_to_keep", 1)):
        _at_least(f"trainer.{name}", getattr(trainer, name), least)
    _check_strategies(arr)
    _drop_inherited(config, given)
    for key, engine in engines_of(config).items():
        check_engine(key, engine)
    _check_chunking(arr.actor, engines_of(config))
    _check_actor(arr.actor, data)
    for name in ("n", "max_num_seqs"):
        _at_least(f"actor_rollout_ref.rollout.{name}", getattr(arr.rollout, name), 1)
    _above_zero("actor_rollout_ref.rollout.temperature", arr.rollout.temperature)
    _at_least("actor_rollout_ref.rollout.top_k", arr.rollout.top_k, -1)
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
    longest, whole = data.max_prompt_length + data.max_response_length, arr.actor.ppo_max_token_len_per_gpu
    for key, engine in engines_of(config).items():
        if longest > (limit := engine.max_token_len_per_gpu):
            inherited = limit == whole
            name = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" if inherited else f"{key}.max_token_len_per_gpu"
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
    _check_given(config, given)


def _drop_inherited(config: TrainConfig, given: set[str]) -> None:
    """The reference has the actor's memory budget, unless set itself; where it chunks or takes logits it needs none."""
    engines = list(engines_of(config).items())
    for key, engine in engines[1:]:
        needless = engine.entropy_from_logits_with_chunking or engine.lm_head == "logits"
        if needless and f"{key}.stats_memory_budget" not in given:
            engine.stats_memory_budget = None


def _check_given(config: TrainConfig, given: set[str]) -> None:
    idle = {**_idle_switches(config), **_idle_loss_options(config)}
    for key in sorted(given):
        for idle_key, reason in idle.items():
            if key.startswith(idle_key) if idle_key.endswith(".") else key == idle_key:
                raise ValueError(f"{key}: has no effect with {reason}; leave one of the two out")


def _idle_switches(config: TrainConfig) -> dict[str, str]:
    """Options of the statistics that no engine takes: key -> why."""
    engines, arr = engines_of(config), config.actor_rollout_ref
    off, own = "entropy_from_logits_with_chunking=false", "the engine's own"
    idle = {}
    for key, engine in engines.items():
        if not engine.entropy_from_logits_with_chunking:
            idle[f"{key}.entropy_from_logits_chunk_size"] = off
    users = {"actor": list(engines.values()), "ref": list(engines.values())[1:]}
    for name, part in (("actor", arr.actor), ("ref", arr.ref)):
        key, chunked = f"actor_rollout_ref.{name}", [e for e in users[name] if e.entropy_from_logits_with_chunking]
        if part.entropy_from_logits_with_chunking and not chunked:
            idle[f"{key}.entropy_from_logits_with_chunking"] = f"{own} {off}"
        if part.entropy_from_logits_chunk_size not in [e.entropy_from_logits_chunk_size for e in chunked]:
            idle[f"{key}.entropy_from_logits_chunk_size"] = f"{own} entropy_from_logits_chunk_size" if chunked else off
    if arr.actor.ppo_max_token_len_per_gpu not in [e.max_token_len_per_gpu for e in engines.values()]:
        idle["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] = f"{own} max_token_len_per_gpu"
    return idle


def _idle_loss_options(config: TrainConfig) -> dict[str, str]:
    actor, whole, idle = config.actor_rollout_ref.actor, "actor_rollout_ref.actor", {}
    if not actor.use_kl_loss:
        idle |= dict.fromkeys((f"{whole}.kl_loss_coef", f"{whole}.kl_loss_type"), "use_kl_loss=false")
        idle["actor_rollout_ref.ref."] = f"{whole}.use_kl_loss=false"
    if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        idle[f"{whole}.clip_ratio"] = "clip_ratio_low and clip_ratio_high set"
    if actor.optim.lr_scheduler_type != "cosine":
        idle[f"{whole}.optim.total_training_steps"] = f"lr_scheduler_type={actor.optim.lr_scheduler_type}"
    return idle
