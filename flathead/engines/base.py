"""The one loop from a packed batch to statistics, loss and step.

An engine never computes a softmax, an entropy, a temperature or a loss. Its forward hands a `MicroStep` the hidden
states and its head (or the logits), at the place where those are whole, and gets a few tensors back.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flathead.batch import IGNORED, PackedBatch
from flathead.config import EngineConfig
from flathead.token_stats import TokenStats, linear_token_stats, token_stats

LossFn = Callable[[TokenStats, PackedBatch], tuple[Tensor, dict[str, Tensor]]]
"""Statistics (N) and their micro-batch -> the loss of every entry (N) and, by name, further entries (N) to average."""


@dataclass(frozen=True)
class MicroStep:
    """What is done at the head for one micro-batch: to be called once, inside the model's forward.

    `**head` is what `token_stats` calls it: shard, vocab_size, softcap, logit_scale, as far as the engine's head has
    them. Both return tensors by name: without a loss function each statistic (N); with one "loss", a scalar for
    `backward()`, and the sums over weighted entries from which the metrics are made.
    """

    batch: PackedBatch
    stats: tuple[str, ...]
    temperature: float
    config: EngineConfig
    loss_fn: LossFn | None = None
    loss_scale: float = 1.0

    def from_hidden(
        self, hidden_NH: Tensor, weight: Tensor, *, bias: Tensor | None = None, **head: Any
    ) -> dict[str, Tensor]:
        """lm_head=fused: hidden (N, H) replicated@TP, weight (V_local, H) S(0)@TP; the logits never exist."""
        return self._results(
            linear_token_stats(
                hidden_NH,
                weight,
                self.batch.labels_N,
                bias=bias,
                mask=self.batch.response_mask_N,
                temperature=self._temperature(),
                stats=self.stats,
                chunk_size=self._chunk_size(None),
                memory_budget=self.config.stats_memory_budget,
                **head,
            )
        )

    def from_logits(self, logits_NV: Tensor, **head: Any) -> dict[str, Tensor]:
        """lm_head=logits: logits (N, V_local) S(-1)@TP. Training overwrites them by their gradient."""
        return self._results(
            token_stats(
                logits_NV,
                self.batch.labels_N.masked_fill(~self.batch.response_mask_N, IGNORED),
                temperature=self._temperature(),
                stats=self.stats,
                chunk_size=self._chunk_size(max(len(logits_NV), 1)),
                inplace_backward=self.loss_fn is not None,
                **head,
            )
        )

    def _chunk_size(self, without_chunking: int | None) -> int | None:
        if self.config.entropy_from_logits_with_chunking:
            return self.config.entropy_from_logits_chunk_size
        return without_chunking

    def _temperature(self) -> float | Tensor:
        """The batch's own for each entry, or one for all."""
        return self.temperature if self.batch.temperature_N is None else self.batch.temperature_N

    def of_rows(self, rows: Tensor) -> "MicroStep":
        """The step of only those rows of its batch, for a rank that has hidden states of no other.

        Without any it is the batch's first row, whose statistics and loss then do not count.
        """
        batch = self.batch.select_rows(rows if len(rows) else torch.zeros(1, dtype=torch.long))
        if not len(rows):
            batch = batch.counting_nothing()
        return replace(self, batch=batch)

    def _results(self, stats_N: TokenStats) -> dict[str, Tensor]:
        if self.loss_fn is None:
            return {name: getattr(stats_N, name) for name in self.stats}
        loss_N, metrics = self.loss_fn(stats_N, self.batch)
        weight_N = self.batch.weight_N
        for name, values_N in {"loss": loss_N, **metrics}.items():
            if values_N.shape != weight_N.shape:
                raise ValueError(
                    f"loss_fn: expected {name} for each entry, {tuple(weight_N.shape)}, got {tuple(values_N.shape)}"
                )
        sums = {name: (weight_N * values_N.detach()).sum() for name, values_N in metrics.items()}
        return {"loss": (weight_N * loss_N).sum() * self.loss_scale, **sums}


def local_device() -> torch.device:
    """This process's device, which it then uses: the GPU of torchrun's LOCAL_RANK, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join_default_group(device: torch.device) -> None:
    """One process alone has a default group of its own, for frameworks that take one for granted."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  # documented there

    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)


def rows_of_part(step: MicroStep, part: int, size: int) -> Tensor:
    """Which of a micro-batch's N entries are in its part-th part of `size` of them."""
    total = len(step.batch.input_ids_N)
    return torch.arange(min(part * size, total), min((part + 1) * size, total))


def over_context(
    result: dict[str, Tensor], step: MicroStep, rows: Tensor, group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """What a rank has from its rows of a micro-batch -> the same on all ranks that share it: sums, statistics (N).

    group: None where a rank has all rows. The rows are ascending; the statistics may begin with no more than them.
    """
    if step.loss_fn is None:
        rows, total = rows.to(step.batch.input_ids_N.device), len(step.batch.input_ids_N)
        result = {n: v.new_zeros(total).index_put_((rows,), v[: len(rows)]) for n, v in result.items()}
    if group is not None:
        for value in result.values():
            dist.all_reduce(value, group=group)
    return result


@dataclass(frozen=True)
class SavedForm:
    """What a model is saved as: like the one that came."""

    architecture: Any
    config: Any
    generation_config: Any
    dtype: torch.dtype

    @classmethod
    def of(cls, model: Any) -> "SavedForm":
        return cls(type(model), model.config, model.generation_config, model.dtype)


class Engine(ABC):
    """A model on this process's devices. Data-parallel ranks are given different batches, the others the same one.

    cp_size: ranks that divide a micro-batch's entries among them (context parallel, Ulysses).
    loss_scale: what turns the gradient this engine makes of a rank's loss into the gradient of the loss's sum over the
    data-parallel ranks; their number where the engine averages over them.
    """

    config: EngineConfig
    device: torch.device
    saved_form: SavedForm
    dp_rank: int = 0
    dp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    dp_group: dist.ProcessGroup | None = None
    loss_scale: float = 1.0

    @abstractmethod
    def forward(self, step: MicroStep) -> dict[str, Tensor]:
        """Runs the model on `step.batch` and returns what `step.from_hidden` or `step.from_logits` returned."""

    @abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clips the gradients by their norm over all ranks, steps, forgets them; returns `grad_norm` and `lr`."""

    @property
    def state_layout(self) -> str | None:
        """The layout that alone can read a saved state; None: any can."""
        return None

    @abstractmethod
    def train_mode(self, training: bool) -> None:
        """Dropout, activation checkpointing and the like on or off."""

    @abstractmethod
    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, on every rank, under its Hugging Face name (tied ones once). All ranks take part."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and schedule in this rank's shards, as torch.distributed.checkpoint takes them."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save_pretrained(self, path: str | Path) -> None:
        """Writes the model in Hugging Face's format, from rank 0. All ranks take part."""
        rank, form, weights = dist.get_rank() if dist.is_initialized() else 0, self.saved_form, {}
        for name, tensor in self.full_weights():
            if rank == 0:
                weights[name] = tensor.to("cpu", form.dtype if tensor.is_floating_point() else tensor.dtype)
        if rank == 0:
            with torch.device("meta"):
                twin = form.architecture._from_config(form.config, dtype=form.dtype)
            twin.generation_config = form.generation_config
            twin.save_pretrained(path, state_dict=weights)
        if dist.is_initialized():
            dist.barrier()

    def token_stats(
        self, batch: PackedBatch, stats: tuple[str, ...] = ("log_prob", "entropy"), *, temperature: float = 1.0
    ) -> TokenStats:
        """The statistics (N) of the response entries in the batch's order, 0 elsewhere; keeps nothing for backward.

        temperature: of all samples; 1.0 where the batch has `temperature_N`, one for each entry.
        """
        _check_temperature(temperature, batch)
        self.train_mode(False)
        parts, micros = self._micro_batches(batch)
        with torch.no_grad():
            results = self.run([MicroStep(micro, stats, temperature, self.config) for micro in micros])
        values = {}
        for name in stats:
            values[name] = results[0][name].new_zeros(len(batch.input_ids_N))
            for part, result in zip(parts, results, strict=False):  # what is left over are fillers
                values[name][batch.rows_of(part).to(self.device)] = result[name]
        return TokenStats(**{name: value.to(batch.input_ids_N.device) for name, value in values.items()})

    def train_step(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        stats: tuple[str, ...] = ("log_prob", "entropy"),
        *,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """One optimizer step on sum(weight_N * loss_N) over the batches of all data-parallel ranks.

        Returns that sum as `loss`, the means over all ranks of loss_fn's metrics, weighted by weight_N, and what
        `optimizer_step` returns. Neither the size of micro-batches nor the number of ranks changes any of it.
        """
        _check_temperature(temperature, batch)
        self.train_mode(True)
        _, micros = self._micro_batches(batch)
        results = self.run(
            [MicroStep(micro, stats, temperature, self.config, loss_fn, self.loss_scale) for micro in micros]
        )
        sums = {name: sum(float(result[name]) for result in results) for name in results[0]}
        sums["loss"] /= self.loss_scale
        totals = self._sum_over_dp({**sums, "weight": float(batch.weight_N.sum())})
        weight = totals.pop("weight")
        if not weight > 0:
            raise ValueError(f"weight_N: expected a positive sum over all data-parallel ranks, got {weight}")
        means = {name: total if name == "loss" else total / weight for name, total in totals.items()}
        return {**means, **self.optimizer_step()}

    def run(self, steps: list[MicroStep]) -> list[dict[str, Tensor]]:
        """Forward, and backward where there is a loss, of every micro-batch. A pipeline has its own order for these."""
        results = []
        for step in steps:
            result = self.forward(step)
            if step.loss_fn is not None:
                result["loss"].backward()
            results.append({name: value.detach() for name, value in result.items()})
        return results

    def _micro_batches(self, batch: PackedBatch) -> tuple[list[list[int]], list[PackedBatch]]:
        """Micro-batches, as many on every data-parallel rank: their collectives must meet. The last may be fillers."""
        count, parts = 0, batch.partition(self.config.max_token_len_per_gpu)
        while (most := self._most_over_dp(len(parts))) > count:
            count, parts = most, batch.partition(self.config.max_token_len_per_gpu, at_least=most)
        micros = [batch.select(part).to(self.device) for part in parts]
        if len(micros) < count:
            shortest = min(range(len(batch.lengths)), key=batch.lengths.__getitem__)
            filler = batch.select([shortest]).to(self.device).counting_nothing()
            micros += [filler] * (count - len(micros))
        return parts, micros

    def _most_over_dp(self, value: int) -> int:
        return int(self._reduced([value], dist.ReduceOp.MAX)[0])

    def _sum_over_dp(self, values: dict[str, float]) -> dict[str, float]:
        return dict(zip(values, self._reduced(list(values.values()), dist.ReduceOp.SUM), strict=True))

    def _reduced(self, values: list[Any], op: Any) -> list[Any]:
        if self.dp_group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op, group=self.dp_group)
        return tensor.tolist()


def _check_temperature(temperature: float, batch: PackedBatch) -> None:
    """On every rank alike: only some of them compute statistics."""
    if batch.temperature_N is not None and temperature != 1.0:
        raise ValueError(
            f"temperature: has no effect with the batch's own temperature_N, got {temperature}; leave one out"
        )
    given = torch.tensor([temperature]) if batch.temperature_N is None else batch.temperature_N
    if not bool(((given > 0) & given.isfinite()).all()):
        name = "temperature" if batch.temperature_N is None else "temperature_N"
        raise ValueError(f"{name}: expected positive finite numbers, got {given[~((given > 0) & given.isfinite())][0]}")
