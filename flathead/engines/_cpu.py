"""The engines' packages, imported for the device there is: without CUDA, what they call "cuda" is this CPU.

Only where things live is changed here, never what is computed; with CUDA nothing is.
Megatron-Core names the device itself: `device="cuda"`, `torch.cuda.current_device()`, types like
"torch.cuda.FloatTensor"; its "cuda" is the CPU for as long as `on_this_device` is open.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from io import StringIO
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _here(value: Any) -> Any:
    """A name of a CUDA device, in any spelling, -> the CPU; anything else unchanged."""
    if isinstance(value, str) and value.startswith("cuda") and value[4:5] in ("", ":"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:  # the optimizers know only types that say "cuda"
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs or kwargs.get("pin_memory"):
            kwargs = {**kwargs, "device": _here(kwargs.get("device"))}
            kwargs.pop("pin_memory", None)
        if func is Tensor.to:
            args = tuple(map(_here, args))
        return func(*args, **kwargs)


_RANDOM = "megatron.core.tensor_parallel.random"
_depth = 0


@contextmanager
def on_this_device() -> Iterator[None]:
    """Inside, Megatron's CUDA calls reach the device there is. May be opened again inside itself.

    Warnings of what Megatron itself still does, such as calling old names of torch, tell a user nothing.
    """
    global _depth
    if _depth:
        yield
        return
    _depth += 1
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", ".*(CUDA_DEVICE_MAX_CONNECTIONS|full scope is deprecated)", UserWarning)
            if torch.cuda.is_available():
                yield
                return
            stack.enter_context(patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")))
            for name in ("synchronize", "empty_cache"):
                stack.enter_context(patch.object(torch.cuda, name, lambda *_, **__: None))
            if _RANDOM in sys.modules:  # recomputation also restores CUDA's random state, of which there is none
                for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
                    stack.enter_context(patch(f"{_RANDOM}.{name}", lambda *_, **__: None))
            stack.enter_context(_CudaIsCpu())
            yield
    finally:
        _depth -= 1


def import_megatron(*modules: str) -> None:
    """Imports Megatron-Core's modules, or what the engine needs of it and mbridge, for the device there is.

    On a CPU Megatron's small functions stay as they are: compiling them, as it does on import, costs minutes there.
    Errors: ModuleNotFoundError naming the extra that brings them.
    """
    modules = modules or ("megatron.core.models.gpt.gpt_model", "megatron.core.optimizer", "mbridge")
    if all(module in sys.modules for module in modules):
        return
    from torch._dynamo import config as dynamo

    try:
        with (
            on_this_device(),
            nullcontext() if torch.cuda.is_available() else dynamo.patch(disable=True),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # that Transformer Engine and Apex, which are not used here, are missing
            for module in modules:
                import_module(module)
    except ModuleNotFoundError as error:
        raise _named(error, "megatron", "megatron", "mbridge", "einops") from error


def _named(error: ModuleNotFoundError, extra: str, *modules: str) -> ModuleNotFoundError:
    """The error again, naming the extra that brings the module, if it is one of those."""
    missing = (error.name or "").partition(".")[0]
    if missing not in modules:
        return error
    return ModuleNotFoundError(f'{missing} is not installed; pip install "flathead[{extra}]"', name=missing)


def import_torchtitan() -> None:
    """Imports what the engine needs of TorchTitan, for the device there is.

    On a CPU it takes the CPU for its device, flex attention, which has no backward there, is SDPA with the same mask,
    and expert parallelism's kernels, which import Triton, are left out.
    Errors: ModuleNotFoundError naming the extra that brings it.
    """
    if "torchtitan.models.qwen3" in sys.modules:
        return
    try:
        if torch.cuda.is_available():
            import_module("torchtitan.models.qwen3")
            return
        import_module("torchtitan")
        kernels: Any = ModuleType("torchtitan.distributed.minimal_async_ep")
        for name in ("combine_op", "dispatch_op", "init_buffer", "MinimalAsyncEPDispatchMetadata"):
            setattr(kernels, name, None)
        kernels.maybe_update_minimal_async_ep_config = lambda *_: None
        sys.modules |= {kernels.__name__: kernels, f"{kernels.__name__}.api": kernels}
        with patch("torch._utils._get_available_device_type", lambda: "cpu"):
            import_module("torchtitan.models.qwen3")
    except ModuleNotFoundError as error:
        raise _named(error, "torchtitan", "torchtitan", "torchdata", "spmd_types", "tyro") from error
    attention: Any = import_module("torchtitan.models.common.attention")
    context: Any = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    attention._compiled_create_block_mask = context._compiled_create_block_mask = attention.create_block_mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(_masked_sdpa)


def _masked_sdpa(
    q_BNLH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, *, block_mask: Any, scale: float | None, enable_gqa: bool, **_: Any
) -> tuple[Tensor, None]:
    """Flex attention's values and gradients by the whole mask."""
    from torch.nn.attention.flex_attention import create_mask

    mask = create_mask(block_mask.mask_mod, 1, 1, q_BNLH.shape[2], k_BNSH.shape[2], device=q_BNLH.device.type)
    options = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(q_BNLH, k_BNSH, v_BNSH, **options), None


def import_automodel() -> None:
    """Errors: ModuleNotFoundError naming the extra that brings NeMo Automodel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Transformer Engine and Apex, which are not used here, are missing
            import_module("nemo_automodel._transformers.auto_model")
    except ModuleNotFoundError as error:
        raise _named(error, "automodel", "nemo_automodel", "torchao", "torchdata") from error


class _TorchHere:
    """torch, whose every device is the CPU."""

    device = staticmethod(lambda *_: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def automodel_on_this_device() -> Iterator[None]:
    """Inside, Automodel builds models on the device there is."""
    if torch.cuda.is_available():
        yield
        return
    builder = import_module("nemo_automodel._transformers.auto_model")
    with patch.object(builder, "torch", _TorchHere()), patch.object(torch.cuda, "current_device", _TorchHere.device):
        yield


def import_veomni() -> None:
    """Imports what the engine needs of VeOmni, for the device there is.

    On a CPU its flash attention, with which it computes under Ulysses, is SDPA sequence by sequence.
    Errors: ModuleNotFoundError naming the extra that brings it.
    """
    if "veomni.models" in sys.modules:
        return
    try:
        with quiet_veomni(), patch.dict(os.environ, VEOMNI_VERBOSITY=os.environ.get("VEOMNI_VERBOSITY", "ERROR")):
            import_module("veomni.models")
    except ModuleNotFoundError as error:
        raise _named(error, "veomni", "veomni", "torchdata") from error
    if not torch.cuda.is_available():
        flash: Any = import_module("veomni.ops.kernels.attention.flash")
        flash._load_veomni_local_flash_kernel = lambda _: SimpleNamespace(
            flash_attn_func=_packed_sdpa, flash_attn_varlen_func=_packed_sdpa
        )
        flash._flash_attention_forward = _packed_sdpa


@contextmanager
def quiet_veomni() -> Iterator[None]:
    """Inside, VeOmni prints nothing, and the loss it gives to Hugging Face's models is theirs again afterwards."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    with redirect_stdout(StringIO()), patch.dict(LOSS_MAPPING):
        yield


def _packed_sdpa(
    q_BSND: Tensor,
    k_BSND: Tensor,
    v_BSND: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    softmax_scale: float | None,
    sliding_window: int | None,
    dropout: float,
    **_: Any,
) -> Tensor:
    """Flash attention's values and gradients for packed sequences."""
    from flathead.engines.packed_attention import packed_sdpa

    return packed_sdpa(
        q_BSND.transpose(1, 2),
        k_BSND.transpose(1, 2),
        v_BSND.transpose(1, 2),
        tuple(cu_seq_lens_q.tolist()),
        dropout=dropout,
        scaling=softmax_scale,
        sliding_window=sliding_window,
    )
