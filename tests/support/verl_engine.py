"""verl's real engines in a gloo process, stock or with Flathead in verl, and what float64 says to their batch."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.memory import TensorMemory
from tests.support.models import tiny

TEMPERATURE, VOCAB = 0.7, 512
_LENGTHS = ([5, 9, 3], [4, 2, 6])  # of the sequences on each rank


def environment(*, flathead: bool) -> dict[str, str]:
    """What a process needs before `import verl`; its engine registry knows only cuda and npu."""
    modules = "tests.support.verl_cpu" + (",flathead.integrations.verl" if flathead else "")
    return {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": modules}


def verl_environment() -> Any:
    """Inside, processes that are started import stock verl on the CPU."""
    return patch.dict(os.environ, {**environment(flathead=False), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"})


@dataclass(frozen=True)
class Run:
    """One engine and one micro-batch."""

    engine: str = "fsdp2"
    remove_padding: bool = True
    fused: str | None = None  # verl's backend
    chunk_size: int | None = None
    checkpointing: bool = False
    compiled: bool = False
    dtype: str = "fp32"
    vocab: int = VOCAB
    repeat: int = 1  # of every length
    keys: tuple[str, ...] = ("log_probs", "entropy", "sum_pi_squared")
    per_sample_temperature: bool = False
    tied: bool = False

    def model(self) -> Any:
        return tiny("llama", vocab_size=self.vocab, tie_word_embeddings=self.tied)


@dataclass
class Outcome:
    """Of one micro-batch: the packed statistics, the gradients, and bytes at most alive and in one piece."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    peak: int
    largest: int


def lengths(rank: int, run: Run) -> list[int]:
    return _LENGTHS[rank] * run.repeat


def packed_ids(rank: int, run: Run) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, run.vocab, (sum(lengths(rank, run)),), generator=generator)


def temperatures(rank: int, run: Run) -> Tensor:
    samples = len(lengths(rank, run))
    return torch.linspace(0.5, 1.5, samples) if run.per_sample_temperature else torch.full((samples,), TEMPERATURE)


def counted(rank: int, run: Run) -> Tensor:
    """(N): all but the last token of each sequence, which predicts nothing: there verl's layouts differ."""
    last = torch.tensor(lengths(rank, run)).cumsum(0) - 1
    return torch.ones(int(last[-1]) + 1, dtype=torch.bool).index_fill(0, last, False)


def weighted(values: dict[str, Tensor], kept: Tensor) -> Tensor:
    """A loss in which every token of every statistic counts differently, and those not kept do not."""
    weight = torch.linspace(-1.0, 1.5, len(kept), dtype=torch.float64) * kept
    scales = {"log_probs": 1.0, "entropy": 0.3, "sum_pi_squared": 2.0}
    return torch.stack([scales[name] * (value * weight.to(value.dtype)).sum() for name, value in values.items()]).sum()


def micro_batch(rank: int, run: Run) -> Any:
    from verl.utils import tensordict_utils as tu

    each = lengths(rank, run)
    offsets = torch.tensor([0, *torch.tensor(each).cumsum(0).tolist()])
    jagged = {
        "input_ids": packed_ids(rank, run),
        "position_ids": torch.cat([torch.arange(n) for n in each]),
        "loss_mask": torch.ones(sum(each)),
    }
    tensors = {name: torch.nested.nested_tensor_from_jagged(v, offsets) for name, v in jagged.items()}
    per_sample = {"temperature": temperatures(rank, run)} if run.per_sample_temperature else {}
    flags = {
        "calculate_entropy": "entropy" in run.keys,
        "calculate_sum_pi_squared": "sum_pi_squared" in run.keys,
        "use_remove_padding": run.remove_padding,
        "use_fused_kernels": run.fused is not None,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(each),
        "pad_token_id": 0,
    }
    if not run.per_sample_temperature:
        flags["temperature"] = TEMPERATURE
    return tu.get_tensordict({**tensors, **per_sample}, flags)


def import_verl() -> None:
    """Before any engine: some import keeps an exception, and with it the frame that was importing."""
    import verl.models.mcore.model_forward_fused
    import verl.workers.config
    import verl.workers.engine  # noqa: F401  # for its effect


def build(run: Run) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config as of
    from verl.workers.engine import EngineRegistry

    with tempfile.TemporaryDirectory() as path:
        run.model().save_pretrained(path)
        model_config = of.HFModelConfig(
            path=path,
            load_tokenizer=False,
            use_remove_padding=run.remove_padding,
            use_fused_kernels=run.fused is not None,
            fused_kernel_options={"impl_backend": run.fused},
            override_config={"attn_implementation": "eager"},
            enable_gradient_checkpointing=False,
        )
        common = {
            "entropy_from_logits_with_chunking": run.chunk_size is not None,
            "entropy_from_logits_chunk_size": run.chunk_size or 2048,
            "entropy_checkpointing": run.checkpointing,
            "use_torch_compile": run.compiled,
            "model_dtype": "fp32",
        }
        if run.engine == "automodel":
            mixed = {f"mp_{name}_dtype": "fp32" for name in ("param", "reduce", "output")}
            config = of.AutomodelEngineConfig(attn_implementation="eager", **mixed, **common)
            optimizer = of.AutomodelOptimizerConfig(lr=1e-3, total_training_steps=10)
        else:
            mixed = {"param_dtype": run.dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
            config = of.FSDPEngineConfig(strategy=run.engine, mixed_precision=mixed, **common)
            optimizer = of.FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
        with automodel_on_gloo() if run.engine == "automodel" else nullcontext():
            engine = EngineRegistry.new(
                "language_model",
                run.engine,
                model_config=model_config,
                engine_config=config,
                optimizer_config=optimizer,
                checkpoint_config=CheckpointConfig(),
            )
            engine.initialize()
        return engine


@contextmanager
def automodel_on_gloo() -> Iterator[None]:
    """verl does not say which backend Automodel's mesh is for, and NCCL is its default."""
    from nemo_automodel.components.distributed import config

    from flathead.engines._cpu import automodel_on_this_device, import_automodel

    import_automodel()
    with (
        automodel_on_this_device(),
        patch.object(config.FSDP2Config, "__init__", partialmethod(config.FSDP2Config.__init__, backend="gloo")),
        patch("torch.cuda.empty_cache"),
    ):
        yield


def train(engine: Any, rank: int, run: Run) -> Outcome:
    """One forward and backward of verl's engine; its gradients are then the mean over the ranks'."""
    kept: dict[str, Tensor] = {}

    def loss(model_output: dict, data: Any, dp_group: Any) -> tuple[Tensor, dict]:
        kept.update({name: model_output[name].values() for name in run.keys})
        return weighted(kept, counted(rank, run)), {}

    with engine.train_mode():
        engine.optimizer_zero_grad()
        # verl runs Automodel in bf16, always: without it, what is compared is the statistics, not the model's rounding.
        exact = patch("torch.autocast", lambda *_, **__: nullcontext()) if run.engine == "automodel" else nullcontext()
        with TensorMemory() as memory, exact:
            engine.forward_backward_batch(micro_batch(rank, run), loss, forward_only=False)
        gradients = {
            name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
            for name, p in engine.module.named_parameters()
        }
    return Outcome({name: value.detach() for name, value in kept.items()}, gradients, memory.peak, memory.largest)


def outcome(rank: int, run: Run) -> Outcome:
    """Of FSDP's or Automodel's engine. The import is made from a frame that holds no engine."""
    import_verl()
    return _outcome(rank, run)


def _outcome(rank: int, run: Run) -> Outcome:
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward  # which verl replaces for its fused kernels, and leaves so
    engine = build(run)
    try:
        return train(engine, rank, run)
    finally:
        LlamaForCausalLM.forward = forward
        del engine
        gc.collect()


def megatron_outcome(rank: int, run: Run, tp: int, sequence_parallel: bool) -> Outcome:
    """The forward step of verl's Megatron engine on a Megatron model that needs no Transformer Engine.

    verl's own builder asks for that; the model is put where the builder would put it. Every rank has rank 0's batch;
    the gradients are those of this rank's shards, and of the norms, summed over sequence parallel ranks.
    """
    from flathead.config import McoreEngineConfig, OptimConfig
    from flathead.engines._cpu import on_this_device
    from flathead.engines.megatron import MegatronEngine

    layout = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    frozen = run.model().requires_grad_(False)
    model = MegatronEngine(frozen, McoreEngineConfig(dtype="float32", **layout), OptimConfig()).model
    model.requires_grad_(True)
    engine = _megatron_engine(model, run)
    batch = micro_batch(0, run)
    with on_this_device(), TensorMemory() as memory:
        output, _ = engine.forward_step(iter([batch]), model, None, lambda *args, **kwargs: None)
        values = {name: output[name].values() for name in run.keys}
        weighted(values, counted(0, run)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if sequence_parallel:
        for name in gradients:
            if "norm" in name:
                dist.all_reduce(gradients[name])
    return Outcome({name: value.detach() for name, value in values.items()}, gradients, memory.peak, memory.largest)


def _megatron_engine(model: Any, run: Run) -> Any:
    from types import SimpleNamespace

    from verl.models.mcore.model_forward_fused import patch_fused_forward
    from verl.workers import config as of
    from verl.workers.engine import MegatronEngineWithLMHead

    engine = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
    engine.engine_config = of.McoreEngineConfig(
        use_fused_kernels=run.fused is not None,
        entropy_from_logits_with_chunking=run.chunk_size is not None,
        entropy_from_logits_chunk_size=run.chunk_size or 2048,
        use_remove_padding=True,
    )
    hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    tokenizer = SimpleNamespace(pad_token_id=0)
    engine.model_config = SimpleNamespace(hf_config=hf_config, tokenizer=tokenizer, mtp=of.MtpConfig())
    engine.tf_config, engine.enable_routing_replay, engine.module = model.config, False, [model]
    if run.fused:
        patch_fused_forward(model)
    return engine


@contextmanager
def flathead_in_verl() -> Iterator[list[dict[str, Any]]]:
    """verl with Flathead in it, and every call of token_stats and linear_token_stats from there: name and arguments."""
    from flathead.integrations import verl, verl_engines, verl_stats

    if not verl.replaced():
        verl.apply()
    calls: list[dict[str, Any]] = []
    stock = {}
    for module in (verl_engines, verl_stats):
        for name in ("token_stats", "linear_token_stats"):
            if hasattr(module, name):
                stock[module, name] = getattr(module, name)
                setattr(module, name, _recorded(name, stock[module, name], calls))
    try:
        yield calls
    finally:
        for (module, name), function in stock.items():
            setattr(module, name, function)
        verl.remove()


def _recorded(name: str, function: Callable[..., Any], calls: list[dict[str, Any]]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append({"name": name, **kwargs})
        return function(*args, **kwargs)

    return recorded


def truth(world: int, run: Run) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Of every rank the statistics, and the mean of the gradients: each sequence alone, in float64, by definition."""
    model = run.model().double()
    model.config._attn_implementation = "eager"
    values, model_grads = [], {}
    for rank in range(world):
        model.zero_grad()
        each, ids = lengths(rank, run), packed_ids(rank, run)
        logits = torch.cat([model(one.unsqueeze(0)).logits[0] for one in ids.split(each)])
        logits = logits / temperatures(rank, run).double().repeat_interleave(torch.tensor(each)).unsqueeze(-1)
        ln_p = logits.log_softmax(-1)
        named = {
            "log_probs": ln_p.gather(-1, ids.roll(-1).unsqueeze(-1)).squeeze(-1),
            "entropy": -(ln_p.exp() * ln_p).sum(-1),
            "sum_pi_squared": (2 * ln_p).exp().sum(-1),
        }
        named = {name: named[name] for name in run.keys}
        weighted(named, counted(rank, run)).backward()
        values.append({name: value.detach() for name, value in named.items()})
        for name, parameter in model.named_parameters():
            model_grads[name] = model_grads.get(name, 0) + parameter.grad / world
    return values, model_grads
