"""Which columns of the vocabulary this rank holds, and the one collective that makes whole rows of them."""

from dataclasses import dataclass
from functools import reduce

import torch.distributed as dist
from torch import Tensor

from flathead import vocab_math


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: expected an int, got {value!r}")


def _check_group(name: str, value: object) -> None:
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise ValueError(f"{name}: expected a torch.distributed.ProcessGroup or None, got {value!r}")


@dataclass(frozen=True)
class VocabShard:
    """Columns `[start, stop)` of the vocabulary, out of `vocab_size` real ones, in a tensor-parallel `group`.

    `stop - start` is the width of the local tensor. Columns at or past `vocab_size` are padding: they take no part and
    get no gradient. Shards may be uneven or empty; together the group's shards cover `[0, vocab_size)` once.
    `group=None` is one rank that holds everything (for the default group pass `torch.distributed.group.WORLD`).
    """

    start: int
    stop: int
    vocab_size: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        for name in ("start", "stop", "vocab_size"):
            _check_int(f"VocabShard.{name}", getattr(self, name))
        _check_group("VocabShard.group", self.group)
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard: expected 0 <= start <= stop, got start={self.start}, stop={self.stop}")
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard.vocab_size: expected at least 1, got {self.vocab_size}")
        if self.group is None and (self.start > 0 or self.stop < self.vocab_size):
            raise ValueError(
                f"VocabShard: columns [{self.start}, {self.stop}) of {self.vocab_size} without a group; "
                "pass the tensor-parallel process group (torch.distributed.group.WORLD for the default one)"
            )

    @classmethod
    def from_group(
        cls, group: dist.ProcessGroup | None, local_size: int, vocab_size: int | None = None
    ) -> "VocabShard":
        """Equal shards of `local_size` columns in rank order (Megatron's layout); the last ones may be padding."""
        _check_group("VocabShard.from_group: group", group)
        _check_int("VocabShard.from_group: local_size", local_size)
        if vocab_size is not None:
            _check_int("VocabShard.from_group: vocab_size", vocab_size)
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if rank < 0:
            raise ValueError("VocabShard.from_group: this process is not a member of the group")
        if vocab_size is not None and vocab_size > size * local_size:
            raise ValueError(
                f"VocabShard.from_group: vocab_size {vocab_size} exceeds {size} shards x {local_size} columns "
                f"= {size * local_size}"
            )
        vocab_size = size * local_size if vocab_size is None else vocab_size
        return cls(rank * local_size, (rank + 1) * local_size, vocab_size, group)

    @property
    def width(self) -> int:
        """Columns of the local tensor, padding included."""
        return self.stop - self.start

    @property
    def live(self) -> int:
        """Real columns of the local tensor: they come first, padding after."""
        return max(0, min(self.stop, self.vocab_size) - self.start)

    def merge_over_group(self, partials_5N: Tensor, beta: float | Tensor) -> Tensor:
        """Partials (5, N) of this shard -> those of the whole row, the same bits on every rank.

        S(vocab)@TP -> replicated@TP by one all-gather of 20 bytes a row; every rank merges in rank order.
        """
        if self.group is None:
            return partials_5N
        size = dist.get_world_size(self.group)
        gathered = partials_5N.new_empty(size * partials_5N.shape[0], *partials_5N.shape[1:])
        dist.all_gather_single(gathered, partials_5N.contiguous(), group=self.group)
        return reduce(lambda a, b: vocab_math.merge(a, b, beta), gathered.chunk(size))

    def sum_over_group(self, grad_hidden: Tensor) -> Tensor:
        """Partial@TP -> replicated@TP, in place: each rank's columns contribute their part of the hidden gradient."""
        if self.group is not None:
            dist.all_reduce(grad_hidden, group=self.group)
        return grad_hidden


def is_dtensor(tensor: object) -> bool:
    # By name: importing torch.distributed.tensor takes a while, and most callers hold plain tensors.
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)


def shard_of_dtensor(name: str, tensor: Tensor, vocab_dim: int, vocab_size: int | None) -> VocabShard:
    """The VocabShard that a DTensor's mesh gives; Shard(vocab_dim) on at most one mesh dimension, the rest replicated
    or sharded along rows.

    Errors: ValueError for a Partial tensor, and for a vocabulary sharded over several mesh dimensions, as FSDP over
    tensor parallel leaves a parameter outside its module's forward.
    """
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    vocab_dim %= tensor.ndim
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{name}: expected Shard or Replicate, got {tensor.placements}; redistribute it first")
    over = [d for d, p in enumerate(tensor.placements) if getattr(p, "dim", None) == vocab_dim]
    if len(over) > 1 or any(not tensor.placements[d].is_shard() for d in over):
        raise ValueError(
            f"{name}: expected the vocabulary sharded over one mesh dimension, got placements {tensor.placements}; "
            "a parameter that FSDP sharded is whole only inside its module's forward: compute the statistics there"
        )
    padded, mesh = tensor.shape[vocab_dim], tensor.device_mesh
    true_size = padded if vocab_size is None else vocab_size
    if true_size > padded:
        raise ValueError(f"vocab_size: expected at most the {padded} columns of {name}, got {true_size}")
    if not over:
        return VocabShard(0, padded, true_size)
    step = -(-padded // mesh.size(over[0]))  # Shard splits as torch.chunk does: the last shards may be short or empty
    start = min(mesh.get_local_rank(over[0]) * step, padded)
    return VocabShard(start, min(start + step, padded), true_size, mesh.get_group(over[0]))


def local_rows(tensor: Tensor, vocabulary: Tensor, vocab_dim: int) -> Tensor:
    """A per-row DTensor (hidden states, labels, mask) -> this rank's rows, whole over the vocabulary's mesh dimension.

    Sequence-parallel hidden states, sharded over that same mesh dimension, are gathered, their gradient is scattered.
    """
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    keep: set[int] = set()
    if isinstance(vocabulary, DTensor) and vocabulary.device_mesh == tensor.device_mesh:
        vocab_dim %= vocabulary.ndim
        keep = {d for d, p in enumerate(vocabulary.placements) if getattr(p, "dim", None) != vocab_dim}
    placements = [p if d in keep and p.is_shard() else Replicate() for d, p in enumerate(tensor.placements)]
    rows = tensor.redistribute(placements=placements).to_local()
    if (wait := getattr(rows, "trigger_wait", None)) is not None:
        wait()  # torch keeps a collective's result until somebody reads it, and without labels nobody does
    return rows


def local_weight(weight: Tensor, hidden: Tensor) -> Tensor:
    """A DTensor weight -> its local rows; over mesh dimensions that shard the tokens its gradient is a partial sum."""
    if not is_dtensor(weight):
        return weight
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(weight, DTensor)
    grads = list(weight.placements)
    if isinstance(hidden, DTensor) and hidden.device_mesh == weight.device_mesh:
        grads = [
            Partial() if w.is_replicate() and h.is_shard() else w
            for w, h in zip(weight.placements, hidden.placements, strict=True)
        ]
    return weight.to_local(grad_placements=grads)
