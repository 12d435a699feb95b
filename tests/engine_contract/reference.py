"""What every engine must do, done plainly: each sequence alone through the stock model, log_softmax, AdamW."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flathead.batch import PackedBatch
from flathead.config import OptimConfig
from flathead.token_stats import TokenStats
from tests.support.models import tiny

TEMPERATURE = 0.8
STATS = ("log_prob", "entropy", "sum_pi_squared")
# A larger eps than usual: without it AdamW turns the rounding of a vanishing gradient into a whole step.
OPTIM = OptimConfig(lr=2e-3, weight_decay=0.1, eps=1e-6, clip_grad=0.5, lr_warmup_steps=2)
STEPS = 2


@dataclass(frozen=True)
class ModelCase:
    family: str
    tied: bool
    heads: tuple[int, int] = (4, 2)  # of queries, of keys and values

    def model(self, seed: int = 0) -> PreTrainedModel:
        heads = {"num_attention_heads": self.heads[0], "num_key_value_heads": self.heads[1]}
        heads["hidden_size"] = 16 * self.heads[0]
        return tiny(self.family, seed=seed, tie_word_embeddings=self.tied, **heads)

    def __str__(self) -> str:
        heads = "" if self.heads == (4, 2) else f"-{self.heads[0]}x{self.heads[1]}-heads"
        return f"{self.family}-{'tied' if self.tied else 'untied'}{heads}"


@dataclass(frozen=True)
class Truth:
    """Of one model on `whole_batch()`: statistics before training, and what the steps did."""

    stats: TokenStats
    steps: list[dict[str, float]]
    weights: dict[str, Tensor]


def whole_batch() -> PackedBatch:
    """Seven sequences of 2 to 14 tokens, one of them without a response; its weights are the token mean."""
    generator = torch.Generator().manual_seed(7)

    def draw(lengths: list[int]) -> list[list[int]]:
        return [torch.randint(3, 512, (n,), generator=generator).tolist() for n in lengths]

    prompts, responses = draw([3, 1, 5, 6, 2, 4, 2]), draw([6, 4, 9, 0, 1, 8, 5])
    prompts[2][1] = responses[5][3] = 0  # the padding token: its embedding, as an input, is not trained
    batch = PackedBatch.from_sequences(prompts, responses)
    tokens = len(batch.input_ids_N)
    return batch.replace(
        advantages_N=torch.randn(tokens, generator=generator),
        old_log_prob_N=-6.0 - torch.rand(tokens, generator=generator),
    )


def loss_fn(stats: TokenStats, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Like a policy-gradient loss, smooth, and in need of all three statistics' gradients."""
    assert stats.log_prob is not None and stats.entropy is not None and stats.sum_pi_squared is not None
    assert batch.advantages_N is not None and batch.old_log_prob_N is not None
    ratio_N = 2 * torch.sigmoid(stats.log_prob - batch.old_log_prob_N)
    loss_N = -ratio_N * batch.advantages_N - 0.1 * stats.entropy + 0.5 * stats.sum_pi_squared
    return loss_N, {"entropy": stats.entropy, "ratio": ratio_N}


def naive_stats(model: PreTrainedModel, batch: PackedBatch) -> TokenStats:
    """(N), sequence by sequence, with the logits in full; 0 outside the response."""
    rows: list[Tensor] = []
    for start, stop in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        temperature = TEMPERATURE if batch.temperature_N is None else batch.temperature_N[start:stop, None].double()
        logits = model(batch.input_ids_N[None, start:stop], use_cache=False).logits[0].double() / temperature
        log_p = torch.log_softmax(logits, -1)
        label = batch.labels_N[start:stop].clamp(min=0)[:, None]
        rows.append(
            torch.stack([log_p.gather(-1, label)[:, 0], -(log_p.exp() * log_p).sum(-1), log_p.exp().square().sum(-1)])
        )
    log_prob, entropy, sum_pi_squared = (torch.cat(rows, -1) * batch.response_mask_N).float()
    return TokenStats(log_prob, entropy, sum_pi_squared)


@cache
def truth(case: ModelCase) -> Truth:
    model, batch, steps = case.model(), whole_batch(), []
    with torch.no_grad():
        before = naive_stats(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=OPTIM.weight_decay, eps=OPTIM.eps)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = lr = OPTIM.lr * min(1.0, (step + 1) / OPTIM.lr_warmup_steps)
        loss_N, metrics = loss_fn(naive_stats(model, batch), batch)
        loss = (batch.weight_N * loss_N).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
        optimizer.step()
        means = {name: float((batch.weight_N * values).sum().detach()) for name, values in metrics.items()}
        steps.append({"loss": float(loss.detach()), **means, "grad_norm": float(norm), "lr": lr})
    return Truth(before, steps, {name: p.detach().clone() for name, p in model.named_parameters()})
