"""Sampling with the current policy: transformers' generation on a copy of the training weights.

A token is drawn by the Gumbel-max trick: argmax of log-probabilities plus Gumbel noise has exactly the distribution
asked for (Gumbel 1954; Maddison et al., arXiv:1411.0030). The noise comes from a generator of the sample's own, seeded
by the run's seed, the step, the prompt and the sample, so that a response depends neither on the samples next to it nor
on the number of processes.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flathead.config import RolloutConfig
from flathead.pretrained import new_model


@dataclass(frozen=True)
class Request:
    """One response to be sampled. key: what its noise is seeded by; None: greedy."""

    prompt_ids: list[int]
    key: tuple[int, ...] | None


class GumbelNoise:
    """A transformers logits processor: adds to each row's scores the noise of that row's own generator."""

    def __init__(self, keys: list[tuple[int, ...]], device: torch.device) -> None:
        self.generators = []
        for key in keys:
            digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") >> 1  # torch takes seeds below 2^63
            self.generators.append(torch.Generator(device).manual_seed(seed))

    def __call__(self, input_ids: Tensor, scores_BV: Tensor) -> Tensor:
        noise_BV = torch.empty_like(scores_BV)
        for row, generator in zip(noise_BV, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores_BV - noise_BV.log()


class Sampler:
    """A copy of the policy for generation, in `config.dtype`; `sync` brings it up to the trained weights."""

    def __init__(self, model_config: Any, tokenizer: Any, config: RolloutConfig, device: torch.device) -> None:
        self.tokenizer, self.config, self.device = tokenizer, config, device
        self.model = new_model(model_config, getattr(torch, config.dtype)).to(device).eval()
        eos = {tokenizer.eos_token_id}
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        self.eos = eos | set([ends] if isinstance(ends, int) else ends or [])

    @torch.no_grad()
    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies every weight, by name. Errors: ValueError for a name this model does not have."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, tensor in weights:
            if name not in own:
                raise ValueError(f"sync: the sampler has no weight called {name}")
            own[name].copy_(tensor)

    def generate(self, requests: list[Request], max_new_tokens: int) -> list[list[int]]:
        """Responses, their end-of-text token included, in the order asked for; each process makes its share."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = dict(self._generate(list(range(rank, len(requests), world)), requests, max_new_tokens))
        if world > 1:
            shares: list[dict[int, list[int]]] = [{} for _ in range(world)]
            dist.all_gather_object(shares, mine)
            mine = {index: ids for share in shares for index, ids in share.items()}
        return [mine[index] for index in range(len(requests))]

    def _generate(
        self, indices: list[int], requests: list[Request], max_new_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Sorted by length, so that a batch has little padding."""
        indices = sorted(indices, key=lambda index: len(requests[index].prompt_ids))
        for start in range(0, len(indices), self.config.max_num_seqs):
            part = indices[start : start + self.config.max_num_seqs]
            yield from zip(part, self._batch([requests[i] for i in part], max_new_tokens), strict=True)

    @torch.no_grad()
    def _batch(self, requests: list[Request], max_new_tokens: int) -> list[list[int]]:
        """Samples of a prompt share its keys and values: each prompt goes through the model once."""
        distinct = dict.fromkeys(tuple(request.prompt_ids) for request in requests)
        prompts = {prompt: row for row, prompt in enumerate(distinct)}
        rows = torch.tensor([prompts[tuple(request.prompt_ids)] for request in requests], device=self.device)
        longest = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids_PT = torch.tensor([[pad] * (longest - len(p)) + [*p] for p in prompts], device=self.device)
        mask_PT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        ids = self.model.generate(
            input_ids=ids_PT[rows],
            attention_mask=mask_PT[rows],
            **self._read_prompts(ids_PT[:, :-1], mask_PT[:, :-1], rows),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            logits_processor=self._processors([r.key for r in requests if r.key is not None]),
            eos_token_id=sorted(self.eos),
            pad_token_id=pad,
        )
        return [self._until_end(row) for row in ids[:, longest:].tolist()]

    def _read_prompts(self, ids_PT: Tensor, mask_PT: Tensor, rows: Tensor) -> dict[str, Any]:
        """Keys and values of the prompts less their last token, one copy for each row, as generate's argument."""
        from transformers import DynamicCache

        if not ids_PT.shape[1]:
            return {}
        # transformers 5.x renames the argument on the way
        name = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"
        cache: Any = DynamicCache(config=self.model.config)
        positions_PT = (mask_PT.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": ids_PT, "attention_mask": mask_PT, "position_ids": positions_PT, name: cache}
        self.model.base_model(**inputs, use_cache=True)
        cache.batch_select_indices(rows)
        return {name: cache}

    def _processors(self, keys: list[tuple[int, ...]]) -> Any:
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        processors = LogitsProcessorList()
        if not keys:
            return processors
        if self.config.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.config.temperature))
        if self.config.top_k > 0:
            processors.append(TopKLogitsWarper(self.config.top_k))
        if self.config.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.config.top_p))
        processors.append(GumbelNoise(keys, self.device))
        return processors

    def _until_end(self, ids: list[int]) -> list[int]:
        for position, token in enumerate(ids):
            if token in self.eos:
                return ids[: position + 1]
        return ids
