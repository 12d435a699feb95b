"""Sampling: exactly the distribution asked for, repeatable, and independent of what is sampled beside it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flathead.config import RolloutConfig
from flathead.rollout import Request, Sampler
from tests.support.jobs import tiny_chat_model

PROMPT = [3, 4, 5, 6]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model that prefers some tokens and looks at positions, and its tokenizer (end of text: 2)."""
    path: Path = tiny_chat_model(tmp_path_factory.mktemp("model"))
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() == 2 else 1)
    return model.eval(), AutoTokenizer.from_pretrained(path)


def sampler(parts: tuple[Any, Any], **options: Any) -> Sampler:
    model, tokenizer = parts
    made = Sampler(model.config, tokenizer, RolloutConfig(**{"dtype": "float32", **options}), torch.device("cpu"))
    made.sync(model.named_parameters())
    return made


def requests(count: int) -> list[Request]:
    """Prompts of one to five tokens, each token another, so that positions tell."""
    return [Request([3 + (i + 5 * j) % 14 for j in range(1 + i % 5)], (0, 1, i)) for i in range(count)]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 2.0, "top_k": 5}], ids=str
)
def test_first_tokens_have_the_distribution_asked_for(parts: tuple[Any, Any], options: dict[str, float]) -> None:
    count = 4000
    with torch.no_grad():
        logits_V = parts[0](input_ids=torch.tensor([PROMPT])).logits[0, -1].double()
    p_V = (logits_V / options.get("temperature", 1.0)).softmax(-1)
    if "top_k" in options:
        p_V = torch.where(p_V >= p_V.topk(int(options["top_k"])).values[-1], p_V, 0)
    if "top_p" in options:
        ordered = p_V.sort(descending=True)
        p_V[ordered.indices[ordered.values.cumsum(-1) - ordered.values >= options["top_p"]]] = 0
    p_V = p_V / p_V.sum()
    made = sampler(parts, max_num_seqs=count, **options)
    seen = Counter(ids[0] for ids in made.generate([Request(PROMPT, (7, i)) for i in range(count)], 1))
    assert all(p_V[token] > 0 for token in seen)
    for token, p in enumerate(p_V.tolist()):  # five standard deviations
        assert abs(seen[token] - count * p) <= 5 * (count * p * (1 - p)) ** 0.5 + 1e-9


def test_a_response_does_not_depend_on_its_neighbours(parts: tuple[Any, Any]) -> None:
    asked = requests(12)
    together = sampler(parts).generate(asked, 6)
    assert sampler(parts, max_num_seqs=1).generate(asked, 6) == together
    assert sampler(parts, max_num_seqs=5).generate(asked[::-1], 6) == together[::-1]
    assert len({tuple(ids) for ids in together}) > 6


def test_samples_of_one_prompt_differ_and_repeat(parts: tuple[Any, Any]) -> None:
    asked = [Request(PROMPT, (0, step, i)) for step in range(2) for i in range(8)]
    once = sampler(parts).generate(asked, 6)
    assert sampler(parts).generate(asked, 6) == once
    assert len({tuple(ids) for ids in once}) > 8 and once[:8] != once[8:]


def test_greedy_is_the_models_own(parts: tuple[Any, Any]) -> None:
    model, _ = parts
    asked = [Request(request.prompt_ids, None) for request in requests(10)]
    for request, ids in zip(asked, sampler(parts, temperature=5.0, top_k=2).generate(asked, 5), strict=True):
        tokens = list(request.prompt_ids)
        for _ in ids:
            with torch.no_grad():
                tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        assert tokens[len(request.prompt_ids) :] == ids


def test_a_response_ends_with_the_end_of_text(parts: tuple[Any, Any]) -> None:
    responses = sampler(parts, temperature=3.0).generate([Request(PROMPT, (i,)) for i in range(64)], 12)
    ended = [ids for ids in responses if 2 in ids]
    assert ended and all(ids.index(2) == len(ids) - 1 for ids in ended)
    assert all(len(ids) == 12 for ids in responses if 2 not in ids)


def test_sync_takes_over_the_weights(parts: tuple[Any, Any]) -> None:
    model, _ = parts
    made = sampler(parts, dtype="bfloat16")
    assert made.model.dtype == torch.bfloat16
    made.sync((name, torch.full_like(weight, 0.5)) for name, weight in model.named_parameters())
    assert all((weight == 0.5).all() for weight in made.model.parameters())
    with pytest.raises(ValueError, match=r"no weight called model.norm.bias"):
        made.sync([("model.norm.bias", torch.zeros(64))])
