"""NeMo Automodel: its `NeMoAutoModelForCausalLM` with its FSDP2 (HSDP too) and tensor parallel.

Hugging Face's own layers (`force_hf`), sharded by Automodel's plans: its own Llama, forward equal to Hugging Face's,
trains otherwise under tensor parallel. Statistics are computed where the head stood in the model's forward.
"""

# NeMo Automodel is installed in an environment of its own, not where types are checked.
# pyright: reportMissingImports=false

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from flathead.config import AutomodelEngineConfig, OptimConfig
from flathead.config_checks import check_engine
from flathead.engines._cpu import automodel_on_this_device, import_automodel
from flathead.engines.base import SavedForm, join_default_group, local_device
from flathead.engines.packed_attention import use_packed_attention
from flathead.engines.sharded import HeadForward, HuggingFaceEngine, check_packing, load_whole, weights_of_rank_0
from flathead.engines.tensor_parallel import check_tensor_parallel, plan_of
from flathead.lm_head import HuggingFaceModel, check_model


class AutomodelEngine(HuggingFaceEngine):
    """A Hugging Face causal LM, built anew by Automodel on all processes of the default group.

    The given model is read (rank 0's weights count) and can be forgotten; fp32 masters, computed with in
    `config.dtype`. Errors: ValueError for sizes that do not divide and models this engine does not take;
    ModuleNotFoundError without NeMo Automodel.
    """

    config: AutomodelEngineConfig

    def __init__(self, model: HuggingFaceModel, config: AutomodelEngineConfig, optim: OptimConfig) -> None:
        check_engine("engine", config)
        check_layout(config, dist.get_world_size() if dist.is_initialized() else 1)
        import_automodel()
        check_model(model)
        check_heads(model, config.tp_size)
        self.config, self.optim = config, optim
        self.device = local_device()
        self.saved_form = SavedForm.of(model)
        check_packing(model.to(self.device), packed={})
        join_default_group(self.device)
        weights = weights_of_rank_0(model, self.device)
        self.model = self._built(model)
        load_whole(self.model, weights)
        self._packed = use_packed_attention(self.model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.forward = HeadForward(self.model, self.model.forward)
        self._make_optimizer()

    def _built(self, model: HuggingFaceModel) -> Any:
        """The same architecture, its weights not yet loaded, sharded."""
        from nemo_automodel import NeMoAutoModelForCausalLM
        from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
        from nemo_automodel.components.distributed.mesh import ParallelismSizes

        precision = MixedPrecisionPolicy()
        if self.config.dtype != "float32":
            precision = MixedPrecisionPolicy(self._dtype, reduce_dtype=torch.float32)
        # Automodel's own plan leaves the gradients of Qwen3's q_norm and k_norm unsummed over TP.
        plan = plan_of(model, self.config.tp_size) if self.config.tp_size > 1 else None
        with automodel_on_this_device():
            setup = DistributedSetup.build(
                strategy=FSDP2Config(sequence_parallel=False, mp_policy=precision, tp_plan=plan),
                parallelism_sizes=ParallelismSizes(
                    dp_replicate_size=self.config.dp_replicate_size, tp_size=self.config.tp_size
                ),
                world_size=dist.get_world_size(),
            )
            built = NeMoAutoModelForCausalLM.from_config(
                model.config,
                distributed_setup=setup,
                force_hf=True,
                use_liger_kernel=False,
                use_sdpa_patching=False,
                attn_implementation=model.config._attn_implementation,
                dtype=torch.float32,
            )
        self._read_mesh(setup.mesh_context.device_mesh)
        return built

    def _read_mesh(self, mesh: Any) -> None:
        from nemo_automodel.components.distributed.mesh_utils import get_flat_mesh

        self.tp_size = self.config.tp_size
        if dist.get_world_size() == 1:
            return
        dp = get_flat_mesh(mesh, "dp")
        self.dp_size, self.dp_rank, self.dp_group = dp.size(), dp.get_local_rank(), dp.get_group()
        self.loss_scale = float(self.dp_size)  # FSDP2 averages gradients over data-parallel ranks

    def autocast(self) -> AbstractContextManager[Any]:
        if isinstance(self.model, FSDPModule) or self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)


def check_heads(model: HuggingFaceModel, tp: int) -> None:
    """Errors: ValueError for a model that tensor parallel over `tp` ranks cannot share."""
    if tp == 1:
        return
    check_tensor_parallel(model, tp)
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(model.config, name)) % tp:
            raise ValueError(
                f"tp_size({tp}) does not divide {name} {heads}, as NeMo Automodel needs; set it to "
                f"{', '.join(str(n) for n in range(1, tp) if heads % n == 0)}, or use strategy=fsdp"
            )


def check_layout(config: AutomodelEngineConfig, world: int, key: str = "engine") -> None:
    """Errors: ValueError where the sizes do not divide the processes; `key`: where the configuration stands."""
    tp, replicas = config.tp_size, config.dp_replicate_size
    for name, size in (("tp_size", tp), ("dp_replicate_size", replicas)):
        if size < 1:
            raise ValueError(f"{key}.{name}: expected at least 1, got {size}")
    if world % (tp * replicas):
        raise ValueError(
            f"{key}: tp_size {tp} x dp_replicate_size {replicas} = {tp * replicas} does not divide the {world} "
            f"processes; start a multiple of {tp * replicas}"
        )
