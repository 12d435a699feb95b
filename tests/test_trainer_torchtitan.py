"""`flathead train --config-name ppo_torchtitan_trainer`, where TorchTitan is installed."""

from tests.support.engine_runs import fsdp, goes_on_exactly, model, the_same_run_as_with_fsdp

__all__ = ["fsdp", "model"]  # fixtures

test_the_same_run_as_with_fsdp = the_same_run_as_with_fsdp(
    "torchtitan",
    {
        "one process": (1, ()),
        "tensor parallel": (2, ("tensor_parallel_size=2",)),
        "context parallel, logits": (2, ("context_parallel_size=2", "lm_head=logits")),
    },
)
test_goes_on_exactly = goes_on_exactly("torchtitan", "tensor_parallel_size=2")
