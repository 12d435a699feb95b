"""Engines: how a model is built, sharded, run and stepped. Which one follows from the type of its options."""

import sys
from typing import TYPE_CHECKING

from flathead.config import EngineConfig, FSDPEngineConfig, McoreEngineConfig, OptimConfig

if TYPE_CHECKING:  # an engine imports its framework
    from flathead.engines.base import Engine
    from flathead.lm_head import HuggingFaceModel

AVAILABLE = ("fsdp", "megatron")


def check_available(strategy: str) -> None:
    """Errors: ValueError for an engine that can be configured but is not part of this version; ModuleNotFoundError
    where its framework is not installed."""
    if strategy not in AVAILABLE:
        raise ValueError(
            f"actor_rollout_ref.actor.strategy: expected an engine of this version, {' or '.join(AVAILABLE)}, got "
            f"{strategy}"
        )
    if strategy == "megatron":
        from flathead.engines.megatron_cpu import import_megatron

        import_megatron()


def make_engine(model: "HuggingFaceModel", config: EngineConfig, optim: OptimConfig) -> "Engine":
    """The engine of these options, on all processes of the default group."""
    if isinstance(config, FSDPEngineConfig):
        from flathead.engines.fsdp import FSDPEngine

        return FSDPEngine(model, config, optim)
    assert isinstance(config, McoreEngineConfig), "check_available comes first"
    from flathead.engines.megatron import MegatronEngine

    return MegatronEngine(model, config, optim)


def layout_of(config: EngineConfig) -> dict[str, int]:
    """The sizes, by their option, over which one model's computation is divided; what is left over is data parallel."""
    if isinstance(config, FSDPEngineConfig):
        names: tuple[str, ...] = ("tensor_parallel_size",)
    else:
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return {name: getattr(config, name) for name in names}


def check_layout(config: EngineConfig, world: int, key: str = "engine") -> None:
    """Errors: ValueError where the sizes do not divide the processes; `key`: where the configuration stands."""
    if isinstance(config, FSDPEngineConfig):
        from flathead.engines import fsdp

        fsdp.check_layout(config, world, key)
    elif isinstance(config, McoreEngineConfig):
        from flathead.engines import megatron

        megatron.check_layout(config, world, key)


def leave_groups() -> None:
    """Before the default process group ends: a framework forgets the groups it made of it."""
    if (megatron := sys.modules.get("megatron.core.parallel_state")) is not None:
        megatron.destroy_model_parallel()
