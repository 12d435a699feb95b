"""A CPU platform for verl, which knows only accelerators: the first of its external modules, in every process.

verl asks for one backend of the CPU and one of the accelerator: here for gloo twice, which torch refuses.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device:
    """torch.cpu, with an accelerator's functions, which have nothing to do here."""

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *_, **__: 0)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> Any:
        return _Device()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # a number would mean an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...
    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...
    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None: ...
    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def _gloo_once(backend: str | None = None, **kwargs: Any) -> None:
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **kwargs)


_init_process_group, dist.init_process_group = dist.init_process_group, _gloo_once
