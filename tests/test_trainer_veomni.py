"""`flathead train --config-name ppo_veomni_trainer`, where VeOmni is installed."""

from tests.support.engine_runs import fsdp, goes_on_exactly, model, the_same_run_as_with_fsdp

__all__ = ["fsdp", "model"]  # fixtures

test_the_same_run_as_with_fsdp = the_same_run_as_with_fsdp(
    "veomni",
    {
        "one process": (1, ()),
        "data parallel": (2, ()),
        "Ulysses, logits": (2, ("ulysses_parallel_size=2", "lm_head=logits")),
    },
)
test_goes_on_exactly = goes_on_exactly("veomni", "ulysses_parallel_size=2")
