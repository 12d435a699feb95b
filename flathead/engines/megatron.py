"""Megatron-Core: tensor, sequence, pipeline and context parallel, its DDP, its (distributed) optimizer, its schedules.

The statistics are computed where GPTModel calls its output layer. lm_head=fused: from the hidden states, gathered over
the sequence, without logits, the weight's gradient added in fp32 into Megatron's own buffer (`main_grad`).
lm_head=logits: the classic way, from vocabulary-parallel logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flathead.config import McoreEngineConfig, OptimConfig, lr_factor
from flathead.config_checks import check_engine
from flathead.engines._cpu import import_megatron, on_this_device
from flathead.engines.base import Engine, MicroStep, SavedForm, join_default_group, local_device, over_context
from flathead.engines.megatron_pack import Pack
from flathead.lm_head import HuggingFaceModel
from flathead.vocab_shard import VocabShard


class MegatronEngine(Engine):
    """A Hugging Face causal LM (Llama, Qwen2, Qwen3) as a Megatron model on all processes of the default group.

    The given model is read (rank 0's counts) and can be forgotten. In bf16 Megatron's optimizer keeps fp32 masters; in
    fp32 the weights are their own. A model without a trained parameter gets neither DDP nor an optimizer.
    Engines in one process share Megatron's process groups: they must have the same parallel sizes.
    Errors: ValueError for sizes that do not divide and models this engine does not take; ModuleNotFoundError without
    Megatron-Core or mbridge.
    """

    config: McoreEngineConfig

    def __init__(self, model: HuggingFaceModel, config: McoreEngineConfig, optim: OptimConfig) -> None:
        check_engine("engine", config)
        check_layout(config, dist.get_world_size() if dist.is_initialized() else 1)
        import_megatron()
        from flathead.engines import megatron_model

        megatron_model.check_model(model.config, config.tensor_model_parallel_size, config.pipeline_model_parallel_size)
        self.config, self.optim, self._steps_done = config, optim, 0
        self.device = local_device()
        self.saved_form = SavedForm.of(model)
        self._vocab_size = model.config.vocab_size
        trained = any(parameter.requires_grad for parameter in model.parameters())
        with on_this_device():
            self._join_groups()
            weights = {name: tensor.to(self.device) for name, tensor in model.state_dict().items()}
            for tensor in weights.values():
                dist.broadcast(tensor, src=0)
            bridge = megatron_model.bridge_of(model.config, self._dtype, self.tp_size, **self._overrides())
            built = megatron_model.build(bridge, weights, model.get_input_embeddings().padding_idx)
            self.model: Any = built.to(self.device)
            self._exported = partial(megatron_model.exported, bridge, built, model.config)
            self.model.config.finalize_model_grads_func = _finalize
            exact = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
            self.model.to(self._dtype)
            self.model.config.params_dtype = self._dtype
            self._head = self.model.output_layer.forward if self._is_last_stage else None
            self.optimizer = None
            self._chunk: Any = self.model.requires_grad_(trained)
            if trained:
                self._chunk, self.optimizer = self._training_parts()
                self._set_masters(exact)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    def _join_groups(self) -> None:
        """Megatron's process groups: made by the first engine, shared by the following ones."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        mpu: Any = parallel_state  # which types groups as `ProcessGroup | int`
        join_default_group(self.device)
        config = self.config
        wanted = (
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.context_parallel_size,
        )
        if mpu.model_parallel_is_initialized():
            found = (
                mpu.get_tensor_model_parallel_world_size(),
                mpu.get_pipeline_model_parallel_world_size(),
                mpu.get_context_parallel_world_size(),
            )
            if found != wanted:
                raise ValueError(
                    "megatron: expected tensor, pipeline and context parallel sizes as those of the engine already in "
                    f"this process, {found}, got {wanted}"
                )
        else:
            mpu.initialize_model_parallel(wanted[0], wanted[1], context_parallel_size=wanted[2])
        initialize_rng_tracker(inference_rng_tracker=True)  # of dropout, which the models here do not have
        self.tp_size, self.cp_size = wanted[0], wanted[2]
        self.cp_rank, self.cp_group = mpu.get_context_parallel_rank(), mpu.get_context_parallel_group()
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.dp_group, self.tp_group = mpu.get_data_parallel_group(), mpu.get_tensor_model_parallel_group()
        self._pp_group, self._pp_size = mpu.get_pipeline_model_parallel_group(), wanted[1]
        self._last_stage = mpu.get_pipeline_model_parallel_last_rank()
        self._is_last_stage = mpu.is_pipeline_last_stage()

    def _overrides(self) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig besides the model's shape: no kernels that need CUDA extensions."""
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return {
            "sequence_parallel": self._sequence_parallel,
            "params_dtype": torch.float32,  # to be filled exactly; then cast
            "use_cpu_initialization": self.device.type == "cpu",
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "persist_layer_norm": False,
            "calculate_per_token_loss": True,  # gradients are summed over ranks, nothing is averaged
            **(recompute if self.config.gradient_checkpointing else {}),
        }

    @property
    def _sequence_parallel(self) -> bool:
        return self.config.sequence_parallel and self.config.tensor_model_parallel_size > 1

    def _training_parts(self) -> tuple[Any, Any]:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        module = Float16Module(self.model.config, self.model) if self._dtype != torch.float32 else self.model
        distributed = self.config.use_distributed_optimizer
        chunk = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
            module,
        )
        optim = self.optim
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad,
                bf16=self._dtype == torch.bfloat16,
                params_dtype=self._dtype,
                use_distributed_optimizer=distributed,
            ),
            [chunk],
        )
        for group in optimizer.param_groups:
            group["weight_decay"] = optim.weight_decay  # for every weight, as on the other engines
        return chunk, optimizer

    def _set_masters(self, exact: dict[str, Tensor]) -> None:
        """The fp32 masters begin at the weights as they came. Megatron begins at them rounded to bf16, from where a
        small learning rate moves nothing that bf16 shows until the steps add up to half a spacing of its numbers."""
        if self._dtype == torch.float32:
            return
        if self.config.use_distributed_optimizer:
            for part in self._parts():
                part.reload_model_params(state_dict=exact)
            return
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.main_param.copy_(exact[name])

    def forward(self, step: MicroStep) -> dict[str, Tensor]:
        """One micro-batch through a model without pipeline stages."""
        (result,) = self.run([step])
        return result

    def run(self, steps: list[MicroStep]) -> list[dict[str, Tensor]]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        training = steps[0].loss_fn is not None
        packs = [Pack.of(step.batch, self._multiple, self.cp_size, self.cp_rank) for step in steps]
        with on_this_device():
            if training:
                self._chunk.zero_grad_buffer()
            results = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iter(list(zip(steps, packs, strict=True))),
                model=[self._chunk],
                num_microbatches=len(steps),
                seq_length=max(len(pack.source_L) for pack in packs),
                micro_batch_size=1,
                forward_only=not training,
            )
            if self._pp_size > 1:
                self.model.set_input_tensor([None])  # else the stage before's last hidden states stay
            results = self._over_stages(results)
            group = self.cp_group if self.cp_size > 1 else None
            return [over_context(r, s, p.rows, group) for r, s, p in zip(results, steps, packs, strict=True)]

    @property
    def _multiple(self) -> int:
        """The tokens of a micro-batch on a rank are padded to a multiple of this."""
        return self.tp_size if self._sequence_parallel else 1

    def _forward_step(self, micro_batches: Iterator[tuple[MicroStep, Pack]], chunk: Any) -> tuple[Any, Any]:
        """What Megatron's schedule calls for each micro-batch on each stage."""
        from megatron.core.packed_seq_params import PackedSeqParams

        step, pack = next(micro_batches)
        ends = torch.tensor(pack.ends, dtype=torch.int32, device=self.device)
        longest = max(stop - start for start, stop in pairwise(pack.ends))
        results: dict[str, Tensor] = {}
        with self._head_of(step, pack, results):
            output = chunk(
                pack.local(step.batch.input_ids_N)[None],
                pack.local(step.batch.position_ids_N)[None],
                None,
                packed_seq_params=PackedSeqParams(
                    qkv_format="thd",
                    cu_seqlens_q=ends,
                    cu_seqlens_kv=ends,
                    max_seqlen_q=longest,
                    max_seqlen_kv=longest,
                    cp_group=self.cp_group,
                ),
            )
        if results:
            output = results.get("loss", output)

        def loss_func(output: Tensor, **_: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            # the count of tokens is Megatron's way to a mean; the weights have made it already
            return output, torch.zeros((), dtype=torch.int), {n: value.detach() for n, value in results.items()}

        return output, loss_func

    @contextmanager
    def _head_of(self, step: MicroStep, pack: Pack, results: dict[str, Tensor]) -> Iterator[None]:
        """In this micro-batch's forward the last stage's output layer computes the statistics, into `results`."""
        if not self._is_last_stage:
            yield
            return
        layer, own = self.model.output_layer, pack.own(step)

        def head(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
            weight, shard = layer.weight if weight is None else weight, None
            assert weight is not None and self._head is not None
            if self.tp_size > 1:
                shard = VocabShard.from_group(self.tp_group, len(weight), self._vocab_size)
            if self.config.lm_head == "fused":
                hidden_LH = self._gathered(hidden)[:, 0]
                main_grad = getattr(weight, "main_grad", None) if own.loss_fn is not None else None
                results.update(own.from_hidden(pack.kept(hidden_LH), weight, shard=shard, main_grad=main_grad))
            else:
                logits_LV = self._head(hidden, weight=weight)[0][:, 0]
                results.update(own.from_logits(pack.kept(logits_LV), shard=shard))
            return hidden[:0, :, :1], None  # Megatron returns them transposed: nothing of it is used

        layer.forward = head
        try:
            yield
        finally:
            del layer.forward

    def _gathered(self, hidden: Tensor) -> Tensor:
        """Sequence-parallel hidden states S(0)@TP -> replicated. Each rank keeps its part of their whole gradient."""
        if not self._sequence_parallel:
            return hidden
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)

    def _over_stages(self, results: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The last stage's results, on every stage."""
        if self._pp_size == 1:
            return results
        held: list[Any] = [[{n: v.cpu() for n, v in result.items()} for result in results]]
        dist.broadcast_object_list(held, src=self._last_stage, group=self._pp_group)
        return [{n: v.to(self.device) for n, v in result.items()} for result in held[0]]

    def train_mode(self, training: bool) -> None:
        self._chunk.train(training)

    def optimizer_step(self) -> dict[str, float]:
        assert self.optimizer is not None, "a model without trained parameters was given"
        lr = self.optim.lr * lr_factor(self.optim, self._steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with on_this_device():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if not norm < float("inf"):
                raise FloatingPointError(f"gradient norm {norm}: a loss, an advantage or a weight is not finite")
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._steps_done += 1
        return {"grad_norm": norm, "lr": lr}

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `Engine.full_weights`; in bf16 the weights the model computes with, in fp32."""
        with on_this_device():
            for name, tensor in self._exported():
                yield name, tensor.float()

    @property
    def state_layout(self) -> str:
        config = self.config
        return (
            f"megatron: {dist.get_world_size()} processes, tensor {config.tensor_model_parallel_size}, pipeline "
            f"{config.pipeline_model_parallel_size}, context {config.context_parallel_size}, "
            f"use_distributed_optimizer {config.use_distributed_optimizer}, {config.dtype}"
        )

    def _own_key(self) -> str:
        """Names this rank's part of the state."""
        return f"rank{dist.get_rank()}"

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """torch's optimizers inside Megatron's, on this rank's masters or shards of them."""
        return [part.optimizer for part in self._parts() if part.optimizer is not None]

    def _parts(self) -> list[Any]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors under its own key: they are read back by the same rank of the same layout."""
        tensors: dict[str, Tensor] = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        for i, optimizer in enumerate(self._optimizers()):
            masters = [p for group in optimizer.param_groups for p in group["params"]]
            for j, master in enumerate(masters):
                state = optimizer.state[master]
                if not state:  # before the first step: as AdamW would begin
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state |= {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
                tensors[f"optimizer.{i}.{j}.master"] = master.detach()
                tensors |= {f"optimizer.{i}.{j}.{name}": value for name, value in state.items()}
        return {self._own_key(): tensors, "steps_done": self._steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.state_dict()[self._own_key()]
        with torch.no_grad(), on_this_device():
            for name, tensor in state[self._own_key()].items():
                if mine[name] is not tensor:
                    mine[name].copy_(tensor)
        self._steps_done = state["steps_done"]


def _finalize(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's sums of gradients over ranks, without its division by a number of tokens."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **kwargs)


def check_layout(config: McoreEngineConfig, world: int, key: str = "engine") -> None:
    """Errors: ValueError where the sizes do not divide the processes; `key`: where the configuration stands."""
    sizes = {
        name: getattr(config, name)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    }
    product = 1
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{key}.{name}: expected at least 1, got {size}")
        product *= size
    if world % product:
        raise ValueError(
            f"{key}: {' x '.join(f'{name} {size}' for name, size in sizes.items())} = {product} does not divide the "
            f"{world} processes; start a multiple of {product}"
        )
