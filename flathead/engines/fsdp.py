"""Hugging Face models with FSDP2, tensor parallel, both at once, or in one process with neither.

The order is torchtitan's: tensor parallel, activation checkpointing, fully_shard. Every process brings the whole model;
rank 0's weights count. Statistics are computed where the head stood in the model's forward: only there are its weights
whole under FSDP2.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flathead.config import FSDPEngineConfig, OptimConfig, lr_factor
from flathead.config_checks import check_engine
from flathead.engines.base import Engine, MicroStep, SavedForm, local_device
from flathead.engines.packed_attention import use_packed_attention, without_mask
from flathead.engines.tensor_parallel import check_tensor_parallel, shard_over_tp
from flathead.lm_head import HuggingFaceModel, check_model, evaluating, no_logits, read_head, replaced_head


class FSDPEngine(Engine):
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
        _check_packing(model, packed={})
        self._packed = use_packed_attention(model)
        if self._packed:
            _check_packing(model, packed={"cu_seqlens": (0, 4, 8)})
        if self.tp_size > 1:
            check_tensor_parallel(model, self.tp_size)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.forward = _HeadForward(model, model.forward)
        if world > 1:
            self._distribute()
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            foreach=False if self.tp_size > 1 else None,  # DTensors of two meshes do not go into one foreach call
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(lr_factor, optim))

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

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    def autocast(self) -> AbstractContextManager[Any]:
        """In one process: computes in `config.dtype` with the fp32 weights; FSDP2 casts them itself."""
        if self.dp_group is not None or self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)

    def forward(self, step: MicroStep) -> dict[str, Tensor]:
        batch = step.batch
        packed = {"cu_seqlens": batch.cu_seqlens} if self._packed else {}
        with self.autocast(), without_mask() if packed else nullcontext():
            return self.model(
                head_fn=self._head_fn(step),
                input_ids=batch.input_ids_N[None],
                position_ids=batch.position_ids_N[None],
                use_cache=False,
                **packed,
            )

    def _head_fn(self, step: MicroStep) -> Callable[[Tensor], dict[str, Tensor]]:
        def head_fn(hidden_1NH: Tensor) -> dict[str, Tensor]:
            head = read_head(self.model)
            if self.config.lm_head == "fused":
                return step.from_hidden(hidden_1NH[0], head.weight, bias=head.bias, **head.form)
            return step.from_logits(nn.functional.linear(hidden_1NH[0], head.weight, head.bias), **head.form)

        return head_fn

    def train_mode(self, training: bool) -> None:
        self.model.train(training)

    def optimizer_step(self) -> dict[str, float]:
        groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                groups[getattr(parameter, "device_mesh", None)].append(parameter)
        norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        lr = self.schedule.get_last_lr()[0]
        if not torch.isfinite(norm):
            raise FloatingPointError(f"gradient norm {float(norm)}: a loss, an advantage or a weight is not finite")
        for group in groups.values():
            clip_grads_with_norm_(group, self.optim.clip_grad, norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return {"grad_norm": float(norm), "lr": float(lr)}

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        persistent = self.model.state_dict().keys()
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if name in persistent:
                tensor = tensor.detach()
                yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


@dataclass(eq=False)
class _HeadForward:
    """`model.forward` that also takes `head_fn`: called with the hidden states where the head's product was, and what
    it returns is returned. FSDP2 finds the tensors in a dictionary, to know when backward begins."""

    model: HuggingFaceModel
    stock: Callable[..., Any]

    def __call__(self, *args: Any, head_fn: Callable[[Tensor], dict[str, Tensor]] | None = None, **kwargs: Any) -> Any:
        if head_fn is None:
            return self.stock(*args, **kwargs)
        results: dict[str, Tensor] = {}

        def head(hidden: Tensor) -> Tensor:
            results.update(head_fn(hidden))
            return no_logits(hidden)

        with replaced_head(self.model, head):
            self.stock(*args, **kwargs)
        return results


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


def _check_packing(model: HuggingFaceModel, packed: dict[str, Any]) -> None:
    """Two sequences of four tokens packed end to end must not see each other.

    `packed`: what tells them apart, besides their positions, in place of a mask."""
    if "flash" in str(model.config._attn_implementation):
        return  # takes the positions itself, and cannot run on these fp32 weights
    ids = torch.arange(8, device=model.device)[None] % 4 + 3
    hidden: list[Tensor] = []

    def head(hidden_1NH: Tensor) -> Tensor:
        hidden.append(hidden_1NH[0])
        return no_logits(hidden_1NH)

    with evaluating(model), replaced_head(model, head):
        model(input_ids=ids[:, :4], use_cache=False)
        with without_mask() if packed else nullcontext():
            positions = torch.arange(8, device=ids.device)[None] % 4
            model(input_ids=ids, position_ids=positions, use_cache=False, **packed)
    alone, second = hidden[0], hidden[1][4:]
    if not torch.allclose(second, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max())):
        raise ValueError(
            f"model: {type(model).__name__} with attention {model.config._attn_implementation} lets packed sequences "
            "see each other; it must make its mask from position_ids (sdpa, eager and flash attention do)"
        )


def _layers(model: HuggingFaceModel) -> list[nn.Module]:
    """What Hugging Face says must stay together on one device: the decoder layers."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
