"""Policy losses, one value per token, and the weights that turn them into one number.

The whole loss is sum(weight_N * loss_N) over all micro-batches and data-parallel ranks: `policy_loss_fn` makes loss_N,
`token_weights` makes weight_N. Entries outside `response_mask_N` are cut off before any exponential: whatever stands
there (a difference of 100, even nan), they have loss 0 and gradient 0.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from flathead.batch import PackedBatch
from flathead.token_stats import TokenStats

LossFn = Callable[[TokenStats, PackedBatch], tuple[Tensor, dict[str, Tensor]]]
"""Statistics (N) and their micro-batch -> the loss of every entry (N) and, by name, further entries (N) to average."""

LOSS_MODES = ("ppo", "cispo")
KL_TYPES = ("k1", "k2", "k3")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")

# Log-ratios are held within this: e^20 is far outside any clip range, and e^89 would overflow fp32.
_LOG_RATIO_LIMIT = 20.0


def stats_needed() -> tuple[str, ...]:
    """What `policy_loss_fn`'s losses read of TokenStats; the entropy is reported even where it is not trained on."""
    return ("log_prob", "entropy")


def policy_loss_fn(
    *,
    loss_mode: str = "ppo",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
    entropy_coeff: float = 0.0,
    kl_loss_coef: float = 0.0,
    kl_loss_type: str = "k3",
) -> LossFn:
    """loss = surrogate - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference), per token.

    With A the advantage and r = pi / pi_old (pi_old = pi of this very moment where the batch has no old_log_prob_N):

        ppo          max(-A r, -A clip(r, 1 - low, 1 + high))        PPO, Schulman et al., arXiv:1707.06347
        + dual clip  where A < 0, at most -A c; c = clip_ratio_c     Ye et al., arXiv:1912.09729
        cispo        -A stopgrad(clip(r, 1 - low, 1 + high)) ln pi   MiniMax-M1, arXiv:2506.13585

    kl_loss_type: see `kl_divergence`. Metrics, detached, all (N): ratio, pg_clipfrac (1 where the clipping decides),
    ppo_kl (ln pi_old - ln pi), entropy; pg_clipfrac_lower with dual clip; kl where the batch has ref_log_prob_N.
    Errors: ValueError for a bad argument here; when called, for a batch or statistics that lack what the loss reads.
    """
    _check(loss_mode, clip_ratio_low, clip_ratio_high, clip_ratio_c, entropy_coeff, kl_loss_coef, kl_loss_type)

    def loss_fn(stats: TokenStats, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        outside_N = ~batch.response_mask_N
        log_prob_N = _given("stats.log_prob", stats.log_prob).masked_fill(outside_N, 0)
        entropy_N = _given("stats.entropy", stats.entropy).masked_fill(outside_N, 0)
        advantages_N = _given("batch.advantages_N", batch.advantages_N).masked_fill(outside_N, 0)
        old = log_prob_N.detach() if batch.old_log_prob_N is None else batch.old_log_prob_N
        log_ratio_N = log_prob_N - old.masked_fill(outside_N, 0)
        ratio_N = log_ratio_N.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
        clipped_N = ratio_N.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
        metrics = {"ratio": ratio_N.masked_fill(outside_N, 0), "ppo_kl": -log_ratio_N, "entropy": entropy_N}
        if loss_mode == "cispo":
            loss_N = -advantages_N * clipped_N.detach() * log_prob_N
            metrics["pg_clipfrac"] = (clipped_N != ratio_N).to(loss_N.dtype)
        else:
            free_N, held_N = -advantages_N * ratio_N, -advantages_N * clipped_N
            loss_N = torch.maximum(free_N, held_N)
            metrics["pg_clipfrac"] = (held_N > free_N).to(loss_N.dtype)
        if clip_ratio_c is not None:
            ceiling_N = torch.where(advantages_N < 0, -advantages_N * clip_ratio_c, math.inf)
            metrics["pg_clipfrac_lower"] = (loss_N > ceiling_N).to(loss_N.dtype)
            loss_N = torch.minimum(loss_N, ceiling_N)
        if entropy_coeff:
            loss_N = loss_N - entropy_coeff * entropy_N
        if batch.ref_log_prob_N is not None or kl_loss_coef:
            reference_N = _given("batch.ref_log_prob_N", batch.ref_log_prob_N).masked_fill(outside_N, 0)
            metrics["kl"] = kl_divergence(log_prob_N, reference_N, kl_loss_type)
            if kl_loss_coef:
                loss_N = loss_N + kl_loss_coef * metrics["kl"]
        return loss_N, {name: values_N.detach() for name, values_N in metrics.items()}

    return loss_fn


def kl_divergence(log_prob_N: Tensor, ref_log_prob_N: Tensor, kl_type: str) -> Tensor:
    """Estimates of KL(pi || ref) at tokens sampled from pi, with d = ln ref - ln pi (J. Schulman, "Approximating KL
    Divergence", 2020):   k1 = -d   k2 = d^2 / 2   k3 = e^d - 1 - d

    k1 and k3 have the divergence as their mean; k2 has its gradient as the mean gradient.
    """
    difference_N = ref_log_prob_N - log_prob_N
    if kl_type == "k1":
        return -difference_N
    if kl_type == "k2":
        return difference_N.square() / 2
    difference_N = difference_N.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return torch.expm1(difference_N) - difference_N


def token_weights(
    response_mask_N: Tensor,
    cu_seqlens: tuple[int, ...],
    mode: str,
    total_tokens: int,
    total_sequences: int,
    max_response_length: int | None = None,
) -> Tensor:
    """weight_N (fp32), so that sum(weight_N * loss_N) over all ranks is the mean that `mode` names; 0 off the mask.

        token-mean               1 / total_tokens
        seq-mean-token-mean      1 / (own response tokens * total_sequences)
        seq-mean-token-sum       1 / total_sequences
        seq-mean-token-sum-norm  1 / (total_sequences * max_response_length)       Dr. GRPO, arXiv:2503.20783

    The totals are those of all data-parallel ranks: response tokens, and sequences (empty responses included).
    Without any token or sequence the weights are 0. Errors: ValueError for an unknown mode, or without the length.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss_agg_mode: expected one of {', '.join(AGGREGATIONS)}, got {mode!r}")
    if mode == "seq-mean-token-sum-norm" and not (max_response_length and max_response_length > 0):
        raise ValueError(f"max_response_length: expected a positive number with {mode}, got {max_response_length}")
    mask_N = response_mask_N.to(torch.float32)
    if mode == "token-mean":
        return mask_N / max(total_tokens, 1)
    if mode == "seq-mean-token-sum":
        return mask_N / max(total_sequences, 1)
    if mode == "seq-mean-token-sum-norm":
        return mask_N / (max(total_sequences, 1) * (max_response_length or 1))
    own = [mask_N[start:stop] / mask_N[start:stop].sum().clamp(min=1) for start, stop in pairwise(cu_seqlens)]
    return torch.cat(own) / max(total_sequences, 1)


def _given(name: str, values_N: Tensor | None) -> Tensor:
    if values_N is None:
        raise ValueError(f"{name}: expected values (N) for this loss, got None")
    return values_N


def _check(mode: str, low: float, high: float, c: float | None, entropy: float, kl: float, kl_type: str) -> None:
    if mode not in LOSS_MODES:
        raise ValueError(f"loss_mode: expected one of {', '.join(LOSS_MODES)}, got {mode!r}")
    if kl_type not in KL_TYPES:
        raise ValueError(f"kl_loss_type: expected one of {', '.join(KL_TYPES)}, got {kl_type!r}")
    if not 0 <= low <= 1:
        raise ValueError(f"clip_ratio_low: expected a number in [0, 1], got {low}")
    for name, value in {"clip_ratio_high": high, "entropy_coeff": entropy, "kl_loss_coef": kl}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a finite number of at least 0, got {value}")
    if c is not None and mode != "ppo":
        raise ValueError(f"clip_ratio_c: expected None with loss_mode={mode}, which has no dual clip, got {c}")
    if c is not None and not 1 < c < math.inf:
        raise ValueError(f"clip_ratio_c: expected a finite number above 1, got {c}; use None for no dual clip")
