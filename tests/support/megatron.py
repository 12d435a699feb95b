"""Megatron's process groups between cases that want different ones."""

import torch.distributed as dist

from flathead.engines._cpu import import_megatron, on_this_device


def leave_megatron_groups() -> None:
    """Megatron forgets its groups, but their threads would stay."""
    import_megatron("megatron.core.parallel_state")
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else ():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def tensor_parallel_group(size: int) -> dist.ProcessGroup:
    """Megatron's, of that size; made anew if it is of another."""
    import_megatron("megatron.core.parallel_state")
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == size:
            return parallel_state.get_tensor_model_parallel_group()
        leave_megatron_groups()
    with on_this_device():
        parallel_state.initialize_model_parallel(size)
    return parallel_state.get_tensor_model_parallel_group()
