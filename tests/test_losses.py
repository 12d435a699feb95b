"""Losses against their equations, token by token in plain Python floats, value and gradient; weights against means."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flathead.batch import PackedBatch
from flathead.losses import AGGREGATIONS, KL_TYPES, kl_divergence, policy_loss_fn, stats_needed, token_weights
from flathead.token_stats import TokenStats

LOW, HIGH, C = 0.2, 0.3, 3.0
# Log-ratios below, at, inside, above the clip range and far out; each meets every sign of the advantage.
LOG_RATIOS = [-1.5, -0.1, 0.0, 0.1, 0.5, 2.0]
ADVANTAGES = [-2.0, 0.0, 1.5]


def make_batch(**columns: Tensor) -> PackedBatch:
    n = len(LOG_RATIOS) * len(ADVANTAGES)
    return PackedBatch.from_sequences([[1, 2]], [[3] * (n)]).replace(**columns)


def case(dtype: torch.dtype = torch.float64) -> tuple[TokenStats, PackedBatch]:
    """One sequence: a masked entry, the 18 combinations, a masked entry at the end."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(r, a) for r in LOG_RATIOS for a in ADVANTAGES]
    old = torch.rand(len(pairs) + 2, generator=generator, dtype=dtype) - 3
    ratio = torch.tensor([0.0, *[r for r, _ in pairs], 0.0], dtype=dtype)
    advantages = torch.tensor([1.0, *[a for _, a in pairs], 1.0], dtype=dtype)
    ref = old + torch.rand(len(old), generator=generator, dtype=dtype) - 0.5
    stats = TokenStats(
        log_prob=(old + ratio).requires_grad_(),
        entropy=torch.rand(len(old), generator=generator, dtype=dtype).requires_grad_(),
    )
    return stats, make_batch(advantages_N=advantages, old_log_prob_N=old, ref_log_prob_N=ref)


def expected(options: dict[str, Any], new: float, old: float, ref: float, a: float, h: float) -> dict[str, float]:
    """Loss, its derivatives by ln pi and by the entropy, and whether clipping decides: case by case, by hand."""
    r, c = math.exp(new - old), options.get("clip_ratio_c")
    if options.get("loss_mode") == "cispo":
        held = min(max(r, 1 - LOW), 1 + HIGH)
        loss, slope, clipped = -a * held * new, -a * held, r != held
    elif a > 0 and r > 1 + HIGH:
        loss, slope, clipped = -a * (1 + HIGH), 0.0, True
    elif a < 0 and r < 1 - LOW:
        loss, slope, clipped = -a * (1 - LOW), 0.0, True
    else:
        loss, slope, clipped = -a * r, -a * r, False
    if c is not None and a < 0 and r > c:
        loss, slope = -a * c, 0.0
    coefficient, beta, d = options.get("entropy_coeff", 0.0), options.get("kl_loss_coef", 0.0), ref - new
    kl, kl_slope = {"k1": (-d, 1.0), "k2": (d * d / 2, -d), "k3": (math.exp(d) - 1 - d, 1 - math.exp(d))}[
        options.get("kl_loss_type", "k3")
    ]
    return {
        "loss": loss - coefficient * h + beta * kl,
        "slope": slope + beta * kl_slope,
        "entropy_slope": -coefficient,
        "pg_clipfrac": float(clipped),
        "kl": kl,
        "ratio": r,
        "ppo_kl": old - new,
        "entropy": h,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_ratio_c": C},
        {"loss_mode": "cispo"},
        {"entropy_coeff": 0.3},
        *({"kl_loss_coef": 0.7, "kl_loss_type": kl_type} for kl_type in KL_TYPES),
        {"clip_ratio_c": C, "entropy_coeff": 0.3, "kl_loss_coef": 0.7},
    ],
    ids=str,
)
def test_every_token_follows_the_equation(options: dict[str, Any]) -> None:
    stats, batch = case()
    assert stats.log_prob is not None and stats.entropy is not None
    loss_N, metrics = policy_loss_fn(clip_ratio_low=LOW, clip_ratio_high=HIGH, **options)(stats, batch)
    loss_N.sum().backward()
    entropy_slope_N = stats.entropy.grad if "entropy_coeff" in options else torch.zeros_like(loss_N)
    got = {**metrics, "loss": loss_N.detach(), "slope": stats.log_prob.grad, "entropy_slope": entropy_slope_N}
    assert batch.old_log_prob_N is not None and batch.ref_log_prob_N is not None and batch.advantages_N is not None
    columns = (stats.log_prob, batch.old_log_prob_N, batch.ref_log_prob_N, batch.advantages_N, stats.entropy)
    for t, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        inside = bool(batch.response_mask_N[t])
        for name, truth in expected(options, *values).items():
            value = got[name][t].item()
            assert value == (pytest.approx(truth, rel=1e-12, abs=1e-14) if inside else 0.0), (t, name)
    assert not any(values_N.requires_grad for values_N in metrics.values())


def test_the_dual_clip_holds_only_very_large_ratios_of_bad_tokens() -> None:
    stats, batch = case()
    _, metrics = policy_loss_fn(clip_ratio_c=C)(stats, batch)
    assert batch.advantages_N is not None
    held = (metrics["ratio"] > C) & (batch.advantages_N < 0)
    assert held.sum() == 1 and torch.equal(metrics["pg_clipfrac_lower"], held.double())


@pytest.mark.parametrize("options", [{}, {"clip_ratio_c": C}, {"loss_mode": "cispo"}], ids=str)
@pytest.mark.parametrize("garbage", [100.0, -1e4, math.inf, math.nan])
@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_what_stands_under_the_mask_changes_nothing(options: dict[str, Any], garbage: float, kl_type: str) -> None:
    loss_fn = policy_loss_fn(**options, entropy_coeff=0.1, kl_loss_coef=0.5, kl_loss_type=kl_type)
    results: list[list[Tensor | None]] = []
    for spoil in (False, True):
        stats, batch = case(torch.float32)
        if spoil:
            outside = ~batch.response_mask_N
            log_prob, entropy = (getattr(stats, name).detach().clone() for name in ("log_prob", "entropy"))
            for column in (log_prob, entropy):
                column[outside] = garbage
            stats = TokenStats(log_prob=log_prob.requires_grad_(), entropy=entropy.requires_grad_())
            assert batch.ref_log_prob_N is not None and batch.advantages_N is not None
            batch = batch.replace(
                ref_log_prob_N=batch.ref_log_prob_N.masked_fill(outside, -garbage),
                advantages_N=batch.advantages_N.masked_fill(outside, garbage),
            )
        loss_N, metrics = loss_fn(stats, batch)
        loss_N.sum().backward()
        assert stats.log_prob is not None and stats.entropy is not None
        results.append([loss_N.detach(), *metrics.values(), stats.log_prob.grad, stats.entropy.grad])
    for clean, spoiled in zip(*results, strict=True):
        assert clean is not None and spoiled is not None and torch.equal(clean, spoiled)
        assert not spoiled[~batch.response_mask_N].any()


@pytest.mark.parametrize("options", [{}, {"loss_mode": "cispo"}], ids=str)
def test_without_old_log_probs_it_is_the_policy_gradient(options: dict[str, Any]) -> None:
    stats, batch = case()
    advantages_N = batch.advantages_N
    assert advantages_N is not None and stats.log_prob is not None
    batch = make_batch(advantages_N=advantages_N)
    loss_N, metrics = policy_loss_fn(**options)(stats, batch)
    loss_N.sum().backward()
    torch.testing.assert_close(stats.log_prob.grad, -advantages_N.masked_fill(~batch.response_mask_N, 0))
    assert not metrics["pg_clipfrac"].any() and not metrics["ppo_kl"].any()
    assert torch.equal(metrics["ratio"], batch.response_mask_N.double()) and "kl" not in metrics


@pytest.mark.parametrize("difference", [-500.0, 500.0])
def test_extreme_ratios_stay_finite_in_fp32(difference: float) -> None:
    batch = PackedBatch.from_sequences([[1]], [[2, 3]])
    log_prob_N = torch.tensor([-600.0, -600.0, 0.0], requires_grad=True)
    batch = batch.replace(
        advantages_N=torch.tensor([1.0, -1.0, 0.0]),
        old_log_prob_N=log_prob_N.detach() + difference,
        ref_log_prob_N=log_prob_N.detach() + difference,
    )
    loss_N, _ = policy_loss_fn(kl_loss_coef=1.0)(TokenStats(log_prob=log_prob_N, entropy=torch.zeros(3)), batch)
    loss_N.sum().backward()
    assert log_prob_N.grad is not None
    assert loss_N.isfinite().all() and log_prob_N.grad.isfinite().all()


def test_the_kl_estimators_estimate_the_kl() -> None:
    """Exact sums over a vocabulary of 50 in place of samples: means of k1 and k3, mean gradient of k2."""
    generator = torch.Generator().manual_seed(1)
    logits_V, ref_V = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))
    logits_V.requires_grad_()
    log_pi_V, log_ref_V = logits_V.log_softmax(0), ref_V.log_softmax(0)
    pi_V = log_pi_V.detach().exp()
    truth = (log_pi_V.exp() * (log_pi_V - log_ref_V)).sum()
    for kl_type in ("k1", "k3"):
        torch.testing.assert_close((pi_V * kl_divergence(log_pi_V, log_ref_V, kl_type)).sum(), truth)
    (slope_V,) = torch.autograd.grad(
        (pi_V * kl_divergence(log_pi_V, log_ref_V, "k2")).sum(), logits_V, retain_graph=True
    )
    torch.testing.assert_close(slope_V, torch.autograd.grad(truth, logits_V)[0])


def test_stats_needed_is_what_the_loss_reads() -> None:
    full, batch = case()
    for missing in stats_needed():
        stats = TokenStats(**{name: getattr(full, name) for name in stats_needed() if name != missing})
        with pytest.raises(ValueError, match=rf"stats\.{missing}: expected"):
            policy_loss_fn()(stats, batch)


def test_a_batch_without_what_the_loss_reads_is_refused() -> None:
    stats, batch = case()
    assert batch.advantages_N is not None
    with pytest.raises(ValueError, match=r"batch\.advantages_N: expected"):
        policy_loss_fn()(stats, make_batch())
    with pytest.raises(ValueError, match=r"batch\.ref_log_prob_N: expected"):
        policy_loss_fn(kl_loss_coef=0.1)(stats, make_batch(advantages_N=batch.advantages_N))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_mode": "gspo"},
        {"kl_loss_type": "k4"},
        {"clip_ratio_low": -0.1},
        {"clip_ratio_low": 1.1},
        {"clip_ratio_high": math.inf},
        {"clip_ratio_c": 1.0},
        {"clip_ratio_c": math.nan},
        {"clip_ratio_c": 3.0, "loss_mode": "cispo"},
        {"entropy_coeff": -1.0},
        {"kl_loss_coef": math.nan},
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))}: expected"):
        policy_loss_fn(**options)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 3))
def test_weights_make_the_mean_of_their_name(lengths: list[int], split: int) -> None:
    """The reference has every sequence's losses in a list; the batch is dealt to two ranks."""
    losses = [[math.sin(7 * b + t) for t in range(length)] for b, length in enumerate(lengths)]
    tokens, sequences = sum(lengths), len(lengths)
    truth = {
        "token-mean": sum(map(sum, losses)) / max(tokens, 1),
        "seq-mean-token-mean": sum(sum(own) / len(own) for own in losses if own) / sequences,
        "seq-mean-token-sum": sum(map(sum, losses)) / sequences,
        "seq-mean-token-sum-norm": sum(map(sum, losses)) / sequences / 9,
    }
    for mode in AGGREGATIONS:
        total = 0.0
        for part in (range(min(split, sequences)), range(min(split, sequences), sequences)):
            if not part:
                continue
            batch = PackedBatch.from_sequences([[1] * (b + 1) for b in part], [[2] * lengths[b] for b in part])
            weight_N = token_weights(
                batch.response_mask_N, batch.cu_seqlens, mode, tokens, sequences, max_response_length=9
            )
            assert weight_N.dtype == torch.float32 and not weight_N[~batch.response_mask_N].any()
            total += sum(
                float(w) * loss
                for b, own in zip(part, batch.unpack(weight_N), strict=True)
                for w, loss in zip(own, losses[b], strict=True)
            )
        assert total == pytest.approx(truth[mode], rel=1e-5, abs=1e-6), mode


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_to_learn_from_weighs_nothing(mode: str) -> None:
    batch = PackedBatch.from_sequences([[1, 2]], [[]])
    assert token_weights(batch.response_mask_N, batch.cu_seqlens, mode, 0, 0, 9).tolist() == [0.0, 0.0]


def test_weights_refuse_what_has_no_meaning() -> None:
    batch = PackedBatch.from_sequences([[1]], [[2]])
    with pytest.raises(ValueError, match="loss_agg_mode: expected one of token-mean"):
        token_weights(batch.response_mask_N, batch.cu_seqlens, "mean", 1, 1)
    with pytest.raises(ValueError, match="max_response_length: expected a positive number"):
        token_weights(batch.response_mask_N, batch.cu_seqlens, "seq-mean-token-sum-norm", 1, 1)
