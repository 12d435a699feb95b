"""Advantages of responses from the rewards of the other responses to the same prompt: no critic.

Every function takes rewards_B and group_B (integer ids; responses to one prompt share one, in any order) and returns
advantages_B in the rewards' dtype. A group of one and a group whose rewards are all equal teach nothing: exactly 0.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def grpo(rewards_B: Tensor, group_B: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """A_b = (r_b - mean) / (std + eps) over the group; std with n - 1 in the denominator, as is usual in code.

    GRPO, Shao et al., arXiv:2402.03300. norm_by_std=False leaves out the division: Dr. GRPO, Liu et al.,
    arXiv:2503.20783. Errors: ValueError for unequal shapes and for rewards that are not finite.
    """
    centered_B, size_B, group_B = _centered(rewards_B, group_B)
    if not norm_by_std:
        return centered_B.to(_dtype(rewards_B))
    variance_B = _group_sum(centered_B.square(), group_B) / (size_B - 1).clamp(min=1)
    return (centered_B / (variance_B.sqrt() + eps)).to(_dtype(rewards_B))


def rloo(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """A_b = r_b - mean of the group's other rewards = n / (n - 1) * (r_b - mean).

    RLOO, Ahmadian et al., arXiv:2402.14740. A response without others has no baseline and gets 0: its bare reward would
    push it up whatever it is worth. Errors: ValueError for unequal shapes and for rewards that are not finite.
    """
    centered_B, size_B, _ = _centered(rewards_B, group_B)
    return (centered_B * size_B / (size_B - 1).clamp(min=1)).to(_dtype(rewards_B))


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": partial(grpo, norm_by_std=False),
    "rloo": rloo,
}


def _centered(rewards_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean and the group's size, both float64 (B), and group numbers from 0 (B)."""
    if rewards_B.dim() != 1 or rewards_B.shape != group_B.shape:
        raise ValueError(
            f"rewards_B, group_B: expected one shape (B,), got {tuple(rewards_B.shape)} and {tuple(group_B.shape)}"
        )
    if not rewards_B.isfinite().all():
        bad = int((~rewards_B.isfinite()).nonzero()[0])
        raise ValueError(f"rewards_B[{bad}]: expected a finite reward, got {rewards_B[bad].item()}")
    numbers_B = torch.unique(group_B, return_inverse=True)[1]
    values_B = rewards_B.double()
    size_B = _group_sum(torch.ones_like(values_B), numbers_B)
    # From the group's least reward on: equal rewards are then exact zeros, which no rounding of the mean can move.
    least_B = values_B.new_zeros(len(values_B)).scatter_reduce(0, numbers_B, values_B, "amin", include_self=False)
    values_B = values_B - least_B[numbers_B]
    return values_B - _group_sum(values_B, numbers_B) / size_B, size_B, numbers_B


def _group_sum(values_B: Tensor, numbers_B: Tensor) -> Tensor:
    return torch.zeros_like(values_B).index_add(0, numbers_B, values_B)[numbers_B]


def _dtype(rewards_B: Tensor) -> torch.dtype:
    return rewards_B.dtype if rewards_B.is_floating_point() else torch.float32
