"""TorchTitan: its models (Llama, Qwen3), its tensor, context and fully sharded data parallel (HSDP too).

The statistics are computed where its decoder calls the head: there the weight is whole over the data-parallel ranks,
and S(0)@TP. lm_head=fused: from hidden states; lm_head=logits: from its logits, S(-1)@TP.
"""

# TorchTitan is installed in an environment of its own, not where types are checked.
# pyright: reportMissingImports=false

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from flathead.config import OptimConfig, TorchtitanEngineConfig
from flathead.config_checks import check_engine
from flathead.engines._cpu import import_torchtitan
from flathead.engines.base import (
    MicroStep,
    SavedForm,
    join_default_group,
    local_device,
    over_context,
    rows_of_part,
)
from flathead.engines.sharded import ShardedEngine, weights_of_rank_0
from flathead.lm_head import HuggingFaceModel
from flathead.vocab_shard import local_rows

_BLOCK = 128  # tokens of a block of flex attention's mask, which context parallel does not divide


class _Pack(NamedTuple):
    """A micro-batch's tokens on this rank: all of them, or under context parallel one contiguous part of L.

    rows: which of the batch's N entries they are; what pads them stands behind, in sequences of one token."""

    tokens_1L: Tensor
    positions_1L: Tensor
    masks: Any
    rows: Tensor


class TorchTitanEngine(ShardedEngine):
    """A Hugging Face causal LM (Llama, Qwen3) as a TorchTitan model on all processes of the default group.

    The given model is read (rank 0's weights count) and can be forgotten; fp32 masters, computed with in
    `config.dtype`. TorchTitan sums gradients over data- and context-parallel ranks.
    Errors: ValueError for sizes that do not divide and models this engine does not take; ModuleNotFoundError without
    TorchTitan.
    """

    config: TorchtitanEngineConfig

    def __init__(self, model: HuggingFaceModel, config: TorchtitanEngineConfig, optim: OptimConfig) -> None:
        check_engine("engine", config)
        check_layout(config, dist.get_world_size() if dist.is_initialized() else 1)
        import_torchtitan()
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed.utils import set_spmd_backend

        from flathead.engines import torchtitan_model

        torchtitan_model.check_model(model.config, config.tensor_parallel_size)
        self.config, self.optim = config, optim
        self.device = local_device()
        self.saved_form = SavedForm.of(model)
        join_default_group(self.device)
        set_spmd_backend(config.spmd_backend)
        self._dims: Any = ParallelDims(
            dp_replicate=config.data_parallel_replicate_size,
            dp_shard=config.data_parallel_shard_size,
            cp=config.context_parallel_size,
            tp=config.tensor_parallel_size,
            pp=1,
            ep=1,
            world_size=dist.get_world_size(),
            spmd_backend=config.spmd_backend,
        )
        self.tp_size, self.cp_size = self._dims.tp, self._dims.cp
        self.dp_size = self._dims.dp_replicate * self._dims.dp_shard
        if (batch := self._dims.get_optional_mesh("batch")) is not None:
            self.dp_group, self.dp_rank = batch.get_group(), batch.get_local_rank()
        titan = torchtitan_model.model_config(model.config, config.attn_type)
        self._adapter = torchtitan_model.FAMILIES[model.config.model_type][3](titan, None)
        self.model = self._built(titan, weights_of_rank_0(model, self.device))
        torchtitan_model.FAMILIES[model.config.model_type][4](self.model, **self._parallelisms())
        self._hide_padding(model.get_input_embeddings().padding_idx)
        if self.device.type == "cpu":
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        self._product = self.model.lm_head.forward
        self._make_optimizer()

    def _built(self, titan: Any, weights: dict[str, Tensor]) -> Any:
        """The whole model with those weights, not yet parallel; told how it will be."""
        from types import SimpleNamespace

        titan.update_from_config(config=SimpleNamespace(parallelism=self._parallelisms()["parallelism"]))
        with self.device:
            model = titan.build()
        model.load_state_dict(self._adapter.from_hf(weights))
        stock = model.parallelize

        def parallelize(dims: Any) -> None:
            stock(dims)
            if titan.enable_weight_tying:  # each of the two has become a parameter of its own
                model.tok_embeddings.weight = model.lm_head.weight

        model.parallelize = parallelize
        return model

    def _parallelisms(self) -> dict[str, Any]:
        """What TorchTitan's parallelisation of a model is told."""
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed.activation_checkpoint import FullAC

        dims = self._dims
        return {
            "parallel_dims": dims,
            "training": TrainingConfig(mixed_precision_param=self.config.dtype),
            "parallelism": ParallelismConfig(
                data_parallel_replicate_degree=dims.dp_replicate,
                data_parallel_shard_degree=dims.dp_shard,
                tensor_parallel_degree=dims.tp,
                context_parallel_degree=dims.cp,
                enable_sequence_parallel=self.config.sequence_parallel,
                spmd_backend=self.config.spmd_backend,
            ),
            "compile_config": CompileConfig(),
            "ac_config": FullAC.Config() if self.config.gradient_checkpointing else None,
            "dump_folder": "",
        }

    def _hide_padding(self, padding_idx: int | None) -> None:
        """The padding token's embedding is not trained as an input, as in Hugging Face's model."""
        if padding_idx is None:
            return
        embedding, first = self.model.tok_embeddings, 0
        rows = embedding.num_embeddings
        if embedding.tp_group is not None:
            rows = -(-rows // self.tp_size)
            first = dist.get_rank(embedding.tp_group) * rows
        embedding.padding_idx = padding_idx - first if first <= padding_idx < first + rows else None

    def forward(self, step: MicroStep) -> dict[str, Tensor]:
        pack = self._packed(step)
        own = step.of_rows(pack.rows) if self.cp_size > 1 else step

        def head(hidden: Tensor) -> dict[str, Tensor]:
            kept = slice(max(len(pack.rows), 1))
            if self.config.lm_head == "fused":
                weight = self.model.lm_head.weight
                return own.from_hidden(local_rows(hidden, weight, 0)[0, kept], weight)
            return own.from_logits(self._product(hidden)[0, kept])

        with self._head(head):
            result = self.model(pack.tokens_1L, positions=pack.positions_1L, attention_masks=pack.masks)
        return result

    def run(self, steps: list[MicroStep]) -> list[dict[str, Tensor]]:
        results = super().run(steps)
        group = self._dims.get_mesh("cp").get_group() if self.cp_size > 1 else None
        return [over_context(r, s, self._rows(s), group) for r, s in zip(results, steps, strict=True)]

    @contextmanager
    def _head(self, head: Any) -> Iterator[None]:
        self.model.lm_head.forward = head
        try:
            yield
        finally:
            self.model.lm_head.forward = self._product

    def _padded(self, step: MicroStep) -> int:
        multiple = _BLOCK * self.cp_size if self.cp_size > 1 else self.tp_size
        return -(-len(step.batch.input_ids_N) // multiple) * multiple

    def _rows(self, step: MicroStep) -> Tensor:
        part = self._dims.get_mesh("cp").get_local_rank() if self.cp_size > 1 else 0
        return rows_of_part(step, part, self._padded(step) // self.cp_size)

    def _packed(self, step: MicroStep) -> _Pack:
        batch, padding = step.batch, self._padded(step) - len(step.batch.input_ids_N)
        tokens, positions = (
            torch.nn.functional.pad(tensor_N, (0, padding))[None]
            for tensor_N in (batch.input_ids_N, batch.position_ids_N)
        )
        masks = self.model.get_attention_masks(positions)
        if self.cp_size > 1:
            from torchtitan.distributed.context_parallel import cp_shard

            mesh = self._dims.get_mesh("cp")
            (tokens, positions), masks = cp_shard(mesh, (tokens, positions), masks, load_balancer_type=None)
        return _Pack(tokens, positions, masks, self._rows(step))

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().full_weights():
            yield from self._adapter.to_hf({name: tensor}).items()


def check_layout(config: TorchtitanEngineConfig, world: int, key: str = "engine") -> None:
    """Errors: ValueError where the sizes do not divide the processes, or TorchTitan's option does not run on them.

    `key`: where the configuration stands."""
    sizes = {
        name: getattr(config, name)
        for name in ("data_parallel_replicate_size", "tensor_parallel_size", "context_parallel_size")
    }
    product = 1
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{key}.{name}: expected at least 1, got {size}")
        product *= size
    told = f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} = {product}"
    if world % product:
        raise ValueError(f"{key}: {told} does not divide the {world} processes; start a multiple of {product}")
    if (shard := config.data_parallel_shard_size) not in (-1, world // product):
        raise ValueError(
            f"{key}.data_parallel_shard_size: expected -1 or {world // product}, the ranks that {told} leaves of "
            f"{world} processes, got {shard}"
        )
    if config.spmd_backend == "spmd_types" and world > 1:
        raise ValueError(
            f"{key}.spmd_backend: expected partial_dtensor on {world} processes, got spmd_types, with which TorchTitan "
            "0.3.0 shards no model on torch 2.13"
        )
    if config.attn_type != "flex" and not torch.cuda.is_available():
        raise ValueError(f"{key}.attn_type: expected flex on a CPU, got {config.attn_type}, which needs CUDA")
