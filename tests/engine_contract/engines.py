"""The engines that keep the contract, one row for each layout. A new engine adds rows here and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from flathead.config import FSDPEngineConfig, OptimConfig
from flathead.engines.base import Engine


def _fsdp(**layout: Any) -> Callable[..., Engine]:
    def make(model: PreTrainedModel, optim: OptimConfig, **options: Any) -> Engine:
        from flathead.engines.fsdp import FSDPEngine

        return FSDPEngine(model, FSDPEngineConfig(**{"dtype": "float32", **layout, **options}), optim)

    return make


@dataclass(frozen=True)
class Row:
    name: str
    world: int
    make: Callable[..., Engine]  # (model, optim, **fields of its EngineConfig) -> Engine


ENGINES = [
    Row("fsdp-one-process", 1, _fsdp()),
    Row("fsdp-dp2", 2, _fsdp()),
    Row("fsdp-dp2-offload", 2, _fsdp(param_offload=True)),
    Row("fsdp-tp2", 2, _fsdp(tensor_parallel_size=2)),
    Row("fsdp-dp2xtp2", 4, _fsdp(tensor_parallel_size=2)),
    Row("fsdp-hsdp2x2", 4, _fsdp(fsdp_size=2)),
]
