"""`flathead train --config-name ppo_automodel_trainer`, where NeMo Automodel is installed."""

from tests.support.engine_runs import fsdp, goes_on_exactly, model, the_same_run_as_with_fsdp

__all__ = ["fsdp", "model"]  # fixtures

test_the_same_run_as_with_fsdp = the_same_run_as_with_fsdp(
    "automodel",
    {
        "one process": (1, ()),
        "data parallel": (2, ()),
        "tensor parallel, logits": (2, ("tp_size=2", "lm_head=logits")),
    },
)
test_goes_on_exactly = goes_on_exactly("automodel", "tp_size=2")
