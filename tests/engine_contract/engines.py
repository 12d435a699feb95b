"""The engines that keep the contract, one row for each layout. A new engine adds rows here and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from flathead.config import McoreEngineConfig, OptimConfig
from flathead.engines import ADAPTERS, make_engine
from flathead.engines.base import Engine


def _of(strategy: str, **layout: Any) -> Callable[..., Engine]:
    def make(model: PreTrainedModel, optim: OptimConfig, **options: Any) -> Engine:
        return make_engine(model, ADAPTERS[strategy].config(**{"dtype": "float32", **layout, **options}), optim)

    return make


_megatron_layout: dict[str, Any] = {}


def _megatron(**layout: Any) -> Callable[..., Engine]:
    def make(model: PreTrainedModel, optim: OptimConfig, **options: Any) -> Engine:
        from flathead.engines.megatron import MegatronEngine
        from tests.support.megatron import leave_megatron_groups

        global _megatron_layout
        if _megatron_layout != layout:
            leave_megatron_groups()
            _megatron_layout = layout
        return MegatronEngine(model, McoreEngineConfig(**{"dtype": "float32", **layout, **options}), optim)

    return make


@dataclass(frozen=True)
class Row:
    """families: the model families that the package has. whole_heads: ranks that must divide the attention heads."""

    name: str
    world: int
    make: Callable[..., Engine]  # (model, optim, **fields of its EngineConfig) -> Engine
    families: tuple[str, ...] = ("llama", "qwen2", "qwen3")
    whole_heads: int = 1

    @property
    def family(self) -> str:
        return self.name.partition("-")[0]

    def takes(self, family: str, heads: tuple[int, int]) -> bool:
        return family in self.families and not any(count % self.whole_heads for count in heads)


def _torchtitan(name: str, world: int, whole_heads: int = 1, **layout: Any) -> Row:
    return Row(f"torchtitan-{name}", world, _of("torchtitan", **layout), ("llama", "qwen3"), whole_heads)


ENGINES = [
    Row("fsdp-one-process", 1, _of("fsdp")),
    Row("fsdp-dp2", 2, _of("fsdp")),
    Row("fsdp-dp2-offload", 2, _of("fsdp", param_offload=True)),
    Row("fsdp-tp2", 2, _of("fsdp", tensor_parallel_size=2)),
    Row("fsdp-dp2xtp2", 4, _of("fsdp", tensor_parallel_size=2)),
    Row("fsdp-hsdp2x2", 4, _of("fsdp", fsdp_size=2)),
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
    _torchtitan("one-process", 1),
    _torchtitan("dp2", 2),
    _torchtitan("tp2", 2, 2, tensor_parallel_size=2, sequence_parallel=False),
    _torchtitan("tp2+sp", 2, 2, tensor_parallel_size=2),
    _torchtitan("cp2", 2, context_parallel_size=2),
    _torchtitan("dp2xtp2", 4, 2, tensor_parallel_size=2),
    _torchtitan("hsdp2x2", 4, data_parallel_replicate_size=2),
    _torchtitan("tp2xcp2", 4, 2, tensor_parallel_size=2, context_parallel_size=2),
    Row("automodel-one-process", 1, _of("automodel")),
    Row("automodel-dp2", 2, _of("automodel")),
    Row("automodel-tp2", 2, _of("automodel", tp_size=2), whole_heads=2),
    Row("automodel-dp2xtp2", 4, _of("automodel", tp_size=2), whole_heads=2),
    Row("automodel-hsdp2x2", 4, _of("automodel", dp_replicate_size=2)),
    Row("veomni-one-process", 1, _of("veomni")),
    Row("veomni-dp2", 2, _of("veomni")),
    Row("veomni-ulysses2", 2, _of("veomni", ulysses_parallel_size=2), whole_heads=2),
    Row("veomni-dp2xulysses2", 4, _of("veomni", ulysses_parallel_size=2), whole_heads=2),
    Row("veomni-hsdp2x2", 4, _of("veomni", fsdp_size=2)),
]
