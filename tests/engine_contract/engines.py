"""The engines that keep the contract, one row for each layout. A new engine adds rows here and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from flathead.config import FSDPEngineConfig, McoreEngineConfig, OptimConfig
from flathead.engines.base import Engine
from tests.support.megatron import leave_megatron_groups


def _fsdp(**layout: Any) -> Callable[..., Engine]:
    def make(model: PreTrainedModel, optim: OptimConfig, **options: Any) -> Engine:
        from flathead.engines.fsdp import FSDPEngine

        return FSDPEngine(model, FSDPEngineConfig(**{"dtype": "float32", **layout, **options}), optim)

    return make


_megatron_layout: dict[str, Any] = {}


def _megatron(**layout: Any) -> Callable[..., Engine]:
    def make(model: PreTrainedModel, optim: OptimConfig, **options: Any) -> Engine:
        from flathead.engines.megatron import MegatronEngine

        global _megatron_layout
        if _megatron_layout != layout:
            leave_megatron_groups()
            _megatron_layout = layout
        return MegatronEngine(model, McoreEngineConfig(**{"dtype": "float32", **layout, **options}), optim)

    return make


@dataclass(frozen=True)
class Row:
    name: str
    world: int
    make: Callable[..., Engine]  # (model, optim, **fields of its EngineConfig) -> Engine

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]


ENGINES = [
    Row("fsdp-one-process", 1, _fsdp()),
    Row("fsdp-dp2", 2, _fsdp()),
    Row("fsdp-dp2-offload", 2, _fsdp(param_offload=True)),
    Row("fsdp-tp2", 2, _fsdp(tensor_parallel_size=2)),
    Row("fsdp-dp2xtp2", 4, _fsdp(tensor_parallel_size=2)),
    Row("fsdp-hsdp2x2", 4, _fsdp(fsdp_size=2)),
    Row("megatron-one-process", 1, _megatron()),
    Row("megatron-dp2", 2, _megatron()),
    Row("megatron-dp2-replicated", 2, _megatron(use_distributed_optimizer=False)),
    Row("megatron-tp2", 2, _megatron(tensor_model_parallel_size=2, sequence_parallel=False)),
    Row("megatron-tp2+sp", 2, _megatron(tensor_model_parallel_size=2)),
    Row("megatron-pp2", 2, _megatron(pipeline_model_parallel_size=2)),
    Row("megatron-cp2", 2, _megatron(context_parallel_size=2)),
    Row("megatron-tp2xpp2", 4, _megatron(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    Row("megatron-tp2xdp2", 4, _megatron(tensor_model_parallel_size=2)),
    Row("megatron-tp2xcp2", 4, _megatron(tensor_model_parallel_size=2, context_parallel_size=2)),
]
