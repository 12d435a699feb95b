"""Hugging Face models with FSDP2, tensor parallel, both at once, or in one process with neither.

The order is torchtitan's: tensor parallel, activation checkpointing, fully_shard. Every process brings the whole model;
rank 0's weights count.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from flathead.config import FSDPEngineConfig, OptimConfig
from flathead.config_checks import check_engine
from flathead.engines.base import SavedForm, local_device
from flathead.engines.packed_attention import use_packed_attention
from flathead.engines.sharded import HeadForward, HuggingFaceEngine, check_packing
from flathead.engines.tensor_parallel import check_tensor_parallel, shard_over_tp
from flathead.lm_head import HuggingFaceModel, check_model


class FSDPEngine(HuggingFaceEngine):
    """A Hugging Face causal LM on all processes of the default group, or on this one when there is none.

    The model is changed in place and belongs to the engine from then on; its weights become fp32 masters, computed with
    in `config.dtype`. Errors: ValueError for sizes that do not divide, options without effect, models whose head or
    packed attention is not what this engine takes them for.
    """

    config: FSDPEngineConfig

    def __init__(self, model: HuggingFaceModel, config: FSDPEngineConfig, optim: OptimConfig) -> None:
        check_engine("engine", config)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.config, self.optim = config, optim
        self.tp_size, self.dp_size = config.tensor_parallel_size, world // max(config.tensor_parallel_size, 1)
        check_layout(config, world)
        check_model(model)
        self.device = local_device()
        self.saved_form = SavedForm.of(model)
        self.model = model.to(self.device, torch.float32)
        check_packing(model, packed={})
        self._packed = use_packed_attention(model)
        if self._packed:
            check_packing(model, packed={"cu_seqlens": (0, 4, 8)})
        if self.tp_size > 1:
            check_tensor_parallel(model, self.tp_size)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.forward = HeadForward(model, model.forward)
        if world > 1:
            self._distribute()
        self._make_optimizer()

    def _distribute(self) -> None:
        """Tensor parallel over neighbouring ranks, then FSDP2 per layer and for the rest over the remaining ones."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        shard = self.dp_size if self.config.fsdp_size == -1 else self.config.fsdp_size
        mesh = init_device_mesh(
            self.device.type,
            (self.dp_size // shard, shard, self.tp_size),
            mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
        )
        if self.tp_size > 1:
            shard_over_tp(self.model, mesh["tp"])
        dp_mesh: DeviceMesh = mesh["dp_shard"] if shard == self.dp_size else mesh["dp_replicate", "dp_shard"]
        flat = mesh["dp_replicate", "dp_shard"]._flatten("dp")
        self.dp_group, self.dp_rank = flat.get_group(), flat.get_local_rank()
        self.loss_scale = float(self.dp_size)  # FSDP2 averages gradients over data-parallel ranks
        options: dict[str, Any] = {"mesh": dp_mesh, "offload_policy": OffloadPolicy()}
        if self.config.dtype != "float32":
            options["mp_policy"] = MixedPrecisionPolicy(self._dtype, reduce_dtype=torch.float32)
        if self.config.param_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for layer in _layers(self.model):
            fully_shard(layer, **options)
        fully_shard(self.model, **options)

    def autocast(self) -> AbstractContextManager[Any]:
        """In one process: computes in `config.dtype` with the fp32 weights; FSDP2 casts them itself."""
        if self.dp_group is not None or self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)


def check_layout(config: FSDPEngineConfig, world: int, key: str = "engine") -> None:
    """Errors: ValueError where the sizes do not divide the processes; `key`: where the configuration stands."""
    tp, shard = config.tensor_parallel_size, config.fsdp_size
    if tp < 1 or world % tp:
        raise ValueError(
            f"{key}.tensor_parallel_size {tp} does not divide the {world} processes; start a multiple of {tp}"
        )
    dp = world // tp
    if shard != -1 and (shard < 1 or dp % shard):
        raise ValueError(
            f"{key}.fsdp_size {shard} does not divide the {dp} data-parallel ranks ({world} processes / "
            f"tensor_parallel_size {tp}); set it to -1 for all of them"
        )
    if config.param_offload and world == 1:
        raise ValueError(f"{key}.param_offload: has no effect in one process, which shards nothing; leave it false")


def _layers(model: HuggingFaceModel) -> list[nn.Module]:
    """What Hugging Face says must stay together on one device: the decoder layers."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
