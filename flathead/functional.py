"""Drop-in names for unsharded logits, as RL trainers call them; thin calls of `token_stats`.

Entropy comes in the logits' dtype, as its callers expect; log-probabilities and sums of squares in fp32, since a policy
ratio needs more digits than bf16 has.
"""

from torch import Tensor

from flathead.token_stats import token_stats


def entropy_from_logits(logits: Tensor) -> Tensor:
    """entropy = -sum p ln p. logits (..., V) -> (...), in the logits' dtype."""
    entropy = token_stats(logits, None, stats=("entropy",)).entropy
    assert entropy is not None
    return entropy.to(logits.dtype)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`entropy_from_logits`, `chunk_size` rows at a time; the same bits."""
    entropy = token_stats(logits, None, stats=("entropy",), chunk_size=chunk_size).entropy
    assert entropy is not None
    return entropy.to(logits.dtype)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = False) -> Tensor:
    """ln softmax(logits)[label]. logits (..., V), labels (...) -> (...) fp32 (fp64 for fp64 logits)."""
    log_prob = token_stats(logits, labels, stats=("log_prob",), inplace_backward=inplace_backward).log_prob
    assert log_prob is not None
    return log_prob


def sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """sum p^2. logits (..., V) -> (...) fp32 (fp64 for fp64 logits)."""
    sum_pi_squared = token_stats(logits, None, stats=("sum_pi_squared",)).sum_pi_squared
    assert sum_pi_squared is not None
    return sum_pi_squared
