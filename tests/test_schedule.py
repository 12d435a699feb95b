"""The learning rate over the optimizer steps."""

import pytest

from flathead.config import OptimConfig, lr_factor


def test_warm_up_then_cosine_to_zero() -> None:
    optim = OptimConfig(lr_warmup_steps=2, lr_scheduler_type="cosine", total_training_steps=6)
    expected = [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]  # (1 + cos(pi k / 4)) / 2 after the warm-up
    assert [lr_factor(optim, step) for step in range(8)] == pytest.approx(expected, abs=1e-6)


def test_constant_after_the_warm_up() -> None:
    optim = OptimConfig(lr_warmup_steps=4)
    assert [lr_factor(optim, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_factor(OptimConfig(), 0) == 1.0
