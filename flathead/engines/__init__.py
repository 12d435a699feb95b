"""Engines: how a model is built, sharded, run and stepped. Which one follows from the type of its options."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from flathead import config as schema
from flathead.config import EngineConfig, OptimConfig

if TYPE_CHECKING:  # an engine imports its framework
    from flathead.engines.base import Engine
    from flathead.lm_head import HuggingFaceModel


class Adapter(NamedTuple):
    """name: of the class in the module of its strategy. sizes: the options over which one model is divided."""

    config: type[EngineConfig]
    name: str
    sizes: tuple[str, ...]


ADAPTERS = {
    "fsdp": Adapter(schema.FSDPEngineConfig, "FSDPEngine", ("tensor_parallel_size",)),
    "megatron": Adapter(
        schema.McoreEngineConfig,
        "MegatronEngine",
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    ),
    "torchtitan": Adapter(
        schema.TorchtitanEngineConfig, "TorchTitanEngine", ("tensor_parallel_size", "context_parallel_size")
    ),
    "automodel": Adapter(schema.AutomodelEngineConfig, "AutomodelEngine", ("tp_size",)),
    "veomni": Adapter(schema.VeOmniEngineConfig, "VeOmniEngine", ("ulysses_parallel_size",)),
}


def check_available(strategy: str) -> None:
    """Errors: ModuleNotFoundError where the engine's framework is not installed, naming the extra that brings it."""
    from flathead.engines import _cpu

    if (load := getattr(_cpu, f"import_{strategy}", None)) is not None:
        load()


def make_engine(model: "HuggingFaceModel", config: EngineConfig, optim: OptimConfig) -> "Engine":
    """The engine of these options, on all processes of the default group."""
    strategy = _strategy_of(config)
    return getattr(_module(strategy), ADAPTERS[strategy].name)(model, config, optim)


def layout_of(config: EngineConfig) -> dict[str, int]:
    """The sizes, by their option, over which one model's computation is divided; what is left over is data parallel."""
    return {name: getattr(config, name) for name in ADAPTERS[_strategy_of(config)].sizes}


def check_layout(config: EngineConfig, world: int, key: str = "engine") -> None:
    """Errors: ValueError where the sizes do not divide the processes; `key`: where the configuration stands."""
    _module(_strategy_of(config)).check_layout(config, world, key)


def _strategy_of(config: EngineConfig) -> str:
    return next(strategy for strategy, adapter in ADAPTERS.items() if type(config) is adapter.config)


def _module(strategy: str) -> ModuleType:
    return import_module(f"flathead.engines.{strategy}")


def leave_groups() -> None:
    """Before the default process group ends: a framework forgets the groups it made of it."""
    if (megatron := sys.modules.get("megatron.core.parallel_state")) is not None:
        megatron.destroy_model_parallel()
