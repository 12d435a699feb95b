"""Packing, splitting and unpacking lose nothing, mix nothing up, and refuse what cannot be packed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flathead.batch import PackedBatch

tokens = st.lists(st.integers(0, 99), min_size=1, max_size=9)
sequences = st.lists(st.tuples(tokens, st.lists(st.integers(0, 99), max_size=9)), min_size=1, max_size=12)


def packed(pairs: list[tuple[list[int], list[int]]]) -> PackedBatch:
    return PackedBatch.from_sequences([p for p, _ in pairs], [r for _, r in pairs])


def test_the_picture_in_the_docstring() -> None:
    batch = PackedBatch.from_sequences([[1, 2, 3], [6]], [[4, 5], [7, 8, 9]])
    assert batch.input_ids_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert batch.position_ids_N.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.labels_N.tolist() == [2, 3, 4, 5, -100, 7, 8, 9, -100]
    assert batch.response_mask_N.tolist() == [False, False, True, True, False, True, True, True, False]
    assert batch.cu_seqlens == (0, 5, 9)
    assert batch.weight_N.tolist() == pytest.approx([0, 0, 0.2, 0.2, 0, 0.2, 0.2, 0.2, 0])
    assert batch.weight_N.dtype == torch.float32 and batch.labels_N.dtype == torch.int64


@given(sequences)
def test_unpack_gives_back_the_responses(pairs: list[tuple[list[int], list[int]]]) -> None:
    batch = packed(pairs)
    assert [part.tolist() for part in batch.unpack(batch.labels_N)] == [response for _, response in pairs]


@given(sequences, st.integers(18, 60), st.integers(1, 15))
def test_split_keeps_every_sequence_whole_and_once(
    pairs: list[tuple[list[int], list[int]]], max_tokens: int, at_least: int
) -> None:
    batch = packed(pairs)
    batch = batch.replace(advantages_N=torch.arange(batch.cu_seqlens[-1]).float())
    parts, micros = batch.partition(max_tokens, at_least), batch.split(max_tokens, at_least)
    assert sorted(b for part in parts for b in part) == list(range(len(pairs)))
    assert len(parts) >= min(at_least, len(pairs))
    for part, micro in zip(parts, micros, strict=True):
        assert micro.cu_seqlens[-1] <= max_tokens
        alone = packed([pairs[b] for b in part])
        for name in ("input_ids_N", "position_ids_N", "labels_N", "response_mask_N"):
            assert torch.equal(getattr(micro, name), getattr(alone, name)), name
        assert micro.cu_seqlens == alone.cu_seqlens
        assert micro.advantages_N is not None and micro.ref_log_prob_N is None
        assert torch.equal(micro.advantages_N, batch.rows_of(part).float())
    assert sum(float(micro.weight_N.sum()) for micro in micros) == pytest.approx(float(batch.weight_N.sum()))


def test_parts_are_balanced() -> None:
    batch = packed([([1], [1] * (n - 1)) for n in (8, 7, 6, 5, 4, 4, 3, 3)])
    assert sorted(micro.cu_seqlens[-1] for micro in batch.split(20)) == [20, 20]
    assert sorted(micro.cu_seqlens[-1] for micro in batch.split(20, at_least=4)) == [9, 10, 10, 11]


def test_a_device_change_takes_every_tensor_along() -> None:
    batch = packed([([1, 2], [3])]).to("meta")
    assert {t.device.type for t in (batch.input_ids_N, batch.labels_N, batch.weight_N, batch.response_mask_N)} == {
        "meta"
    }


def test_what_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match=r"0 prompts and 0 responses"):
        PackedBatch.from_sequences([], [])
    with pytest.raises(ValueError, match=r"2 prompts and 1 responses"):
        PackedBatch.from_sequences([[1], [2]], [[3]])
    with pytest.raises(ValueError, match=r"prompts\[1\]: expected at least one token"):
        PackedBatch.from_sequences([[1], []], [[3], [4]])
    batch = packed([([1, 2], [3]), ([1], [2, 3, 4, 5])])
    with pytest.raises(ValueError, match=r"max_tokens 4 is less than the 5 tokens of sequence 1"):
        batch.split(4)
    with pytest.raises(ValueError, match=r"advantages_N: expected shape \(8,\) as cu_seqlens says, got \(3,\)"):
        batch.replace(advantages_N=torch.zeros(3))
    with pytest.raises(ValueError, match="cu_seqlens: expected 0 < end"):
        PackedBatch(**{**batch._tensors(), "cu_seqlens": (0, 3, 3, 8)})
