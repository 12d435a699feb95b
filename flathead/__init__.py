"""Flathead: the LM head of RL post-training, exact and flat in memory."""

from flathead.lm_head import install, uninstall
from flathead.token_stats import TokenStats, linear_token_stats, token_stats
from flathead.vocab_shard import VocabShard

__version__ = "0.1.0"
__all__ = ["TokenStats", "VocabShard", "install", "linear_token_stats", "token_stats", "uninstall"]
