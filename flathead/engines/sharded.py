"""What engines on FSDP2 share: optimizer, gradient norm over all meshes, whole weights, state; and for those that run
Hugging Face's forward, where in it the statistics are computed.

Statistics are computed where the head stood in the model's forward: only there are its weights whole under FSDP2.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flathead.config import OptimConfig, lr_factor
from flathead.engines.base import Engine, MicroStep
from flathead.engines.packed_attention import without_mask
from flathead.lm_head import HuggingFaceModel, evaluating, no_logits, read_head, replaced_head


class ShardedEngine(Engine):
    """A module whose parameters are DTensors, or plain tensors in one process, and AdamW over them."""

    model: Any
    optim: OptimConfig

    def _make_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.optim.lr,
            betas=(self.optim.betas[0], self.optim.betas[1]),
            eps=self.optim.eps,
            weight_decay=self.optim.weight_decay,
            foreach=False if self.tp_size > 1 else None,  # DTensors of two meshes do not go into one foreach call
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(lr_factor, self.optim))

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

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
            name = name.replace(_CHECKPOINT_PREFIX, "")  # of recomputed layers, which state_dict leaves out
            if name in persistent:
                tensor = tensor.detach()
                yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def weights_of_rank_0(model: HuggingFaceModel, device: torch.device) -> dict[str, Tensor]:
    """Every weight of a Hugging Face model by its name, in fp32, as the first process has them."""
    weights = {name: tensor.detach().to(device, torch.float32) for name, tensor in model.state_dict().items()}
    if dist.is_initialized():
        for tensor in weights.values():
            dist.broadcast(tensor, src=0)
    return weights


def load_whole(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Whole weights, the same on every rank, into the ranks' shards."""
    set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True, strict=True))


class HuggingFaceEngine(ShardedEngine):
    """A model with Hugging Face's forward. Its `forward` must be made a `HeadForward` before it is sharded."""

    _packed = False  # whether its attention goes by cu_seqlens, without a mask

    def autocast(self) -> AbstractContextManager[Any]:
        """Where nothing else casts the fp32 weights to the computing dtype."""
        return nullcontext()

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


@dataclass(eq=False)
class HeadForward:
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


def check_packing(model: HuggingFaceModel, packed: dict[str, Any]) -> None:
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
