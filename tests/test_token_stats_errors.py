"""Bad input is a ValueError before any work, and says which argument, what was expected and what came."""

# A statistic that was asked for is never None, which the annotation cannot say.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flathead

V = 11
LOGITS = torch.randn(2, 3, V)
HIDDEN, WEIGHT = torch.randn(2, 3, 4), torch.randn(V, 4)
LABELS = torch.tensor([[0, 1, 2], [3, -100, 10]])


def labels_with(value: int) -> torch.Tensor:
    labels = LABELS.clone()
    labels[1, 0] = value
    return labels


def temperature_with(value: float) -> torch.Tensor:
    temperature = torch.ones(2, 3)
    temperature[0, 1] = value
    return temperature


# (arguments to change, the argument the error must name, what came and must be in the message)
SHARED: list[tuple[dict[str, Any], str, str]] = [
    ({"labels": labels_with(-1)}, "labels", "-1"),
    ({"labels": labels_with(V)}, "labels", "11"),
    ({"labels": labels_with(2**40)}, "labels", str(2**40)),
    ({"labels": labels_with(9), "vocab_size": 9}, "labels", "9"),  # inside the padding
    ({"labels": LABELS, "ignore_index": -1}, "labels", "-100"),
    ({"labels": LABELS[0]}, "labels", "(3,)"),
    ({"labels": LABELS.T}, "labels", "(3, 2)"),
    ({"labels": LABELS.float()}, "labels", "float32"),
    ({"labels": LABELS.int()}, "labels", "int32"),
    ({"labels": LABELS.bool()}, "labels", "bool"),
    ({"labels": LABELS.to("meta")}, "labels", "meta"),
    ({"labels": LABELS.tolist()}, "labels", "list"),
    ({"labels": None}, "labels", "None"),
    ({"temperature": 0.0}, "temperature", "0.0"),
    ({"temperature": 0}, "temperature", "0"),
    ({"temperature": -1.0}, "temperature", "-1.0"),
    ({"temperature": math.nan}, "temperature", "nan"),
    ({"temperature": math.inf}, "temperature", "inf"),
    ({"temperature": "1"}, "temperature", "'1'"),
    ({"temperature": None}, "temperature", "None"),
    ({"temperature": temperature_with(0.0)}, "temperature", "0.0"),
    ({"temperature": temperature_with(-2.0)}, "temperature", "-2.0"),
    ({"temperature": temperature_with(math.nan)}, "temperature", "nan"),
    ({"temperature": temperature_with(math.inf)}, "temperature", "inf"),
    ({"temperature": torch.ones(3, 2)}, "temperature", "(3, 2)"),
    ({"temperature": torch.ones(2)}, "temperature", "(2,)"),
    ({"temperature": torch.ones(1, 2, 3)}, "temperature", "(1, 2, 3)"),
    ({"temperature": torch.ones(2, 3, device="meta")}, "temperature", "meta"),
    ({"chunk_size": 0}, "chunk_size", "0"),
    ({"chunk_size": -1}, "chunk_size", "-1"),
    ({"chunk_size": True}, "chunk_size", "True"),
    ({"chunk_size": 1.5}, "chunk_size", "1.5"),
    ({"chunk_size": "8"}, "chunk_size", "'8'"),
    ({"memory_budget": 0}, "memory_budget", "0"),
    ({"memory_budget": -5}, "memory_budget", "-5"),
    ({"memory_budget": 1e6}, "memory_budget", "1000000.0"),
    ({"stats": ()}, "stats", "()"),
    ({"stats": ("log_prob", "entrpy")}, "stats", "entrpy"),
    ({"stats": "entropy"}, "stats", "entropy"),
    ({"impl": "cuda"}, "impl", "cuda"),
    ({"impl": None}, "impl", "None"),
    ({"vocab_size": 0}, "vocab_size", "0"),
    ({"vocab_size": -3}, "vocab_size", "-3"),
    ({"vocab_size": V + 1}, "vocab_size", "12"),
    ({"vocab_size": 5.0}, "vocab_size", "5.0"),
    ({"vocab_size": True}, "vocab_size", "True"),
    ({"softcap": 0.0}, "softcap", "0.0"),
    ({"softcap": -30.0}, "softcap", "-30.0"),
    ({"softcap": math.nan}, "softcap", "nan"),
    ({"logit_scale": 0.0}, "logit_scale", "0.0"),
    ({"logit_scale": math.nan}, "logit_scale", "nan"),
    ({"logit_scale": math.inf}, "logit_scale", "inf"),
    ({"ignore_index": 1.0}, "ignore_index", "1.0"),
    ({"ignore_index": None}, "ignore_index", "None"),
    ({"ignore_index": 2**70}, "ignore_index", str(2**70)),
    ({"labels": LABELS.to_sparse()}, "labels", "sparse"),
    ({"inplace_backward": 1}, "inplace_backward", "1"),
    ({"shard": (0, V)}, "shard", "tuple"),
    ({"shard": flathead.VocabShard(0, V + 1, V, None)}, "shape", "11"),
    ({"shard": flathead.VocabShard(0, V, V, None), "vocab_size": V - 1}, "vocab_size", "10"),
]

FROM_LOGITS: list[tuple[dict[str, Any], str, str]] = [
    ({"logits": LOGITS.long()}, "logits", "int64"),
    ({"logits": LOGITS.to(torch.complex64)}, "logits", "complex64"),
    ({"logits": LOGITS.tolist()}, "logits", "list"),
    ({"logits": torch.tensor(1.0)}, "logits", "()"),
    ({"logits": LOGITS[..., :0]}, "logits", "0"),
    ({"logits": LOGITS[0]}, "labels", "(2, 3)"),
    ({"logits": LOGITS.to_sparse()}, "logits", "sparse"),
    ({"logits": LOGITS[0].to_sparse_csr()}, "logits", "sparse"),
    ({"logits": LOGITS.to("meta")}, "logits", "meta"),
    ({"logits": torch.nested.nested_tensor([LOGITS[0], LOGITS[1]])}, "logits", "nested"),
]

FROM_HIDDEN: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden": HIDDEN.long()}, "hidden", "int64"),
    ({"hidden": HIDDEN[..., :3]}, "weight", "4"),
    ({"hidden": torch.tensor(1.0)}, "hidden", "()"),
    ({"hidden": HIDDEN.to("meta")}, "hidden", "meta"),
    ({"hidden": HIDDEN.to_sparse()}, "hidden", "sparse"),
    ({"weight": WEIGHT.to_sparse()}, "weight", "sparse"),
    ({"weight": WEIGHT.to("meta")}, "weight", "meta"),
    ({"mask": torch.ones(2, 3, dtype=torch.bool).to_sparse()}, "mask", "sparse"),
    ({"weight": WEIGHT.bfloat16()}, "weight", "bfloat16"),
    ({"weight": WEIGHT.long()}, "weight", "int64"),
    ({"weight": WEIGHT[0]}, "weight", "(4,)"),
    ({"weight": WEIGHT.T}, "weight", "(4, 11)"),
    ({"weight": WEIGHT[:0]}, "weight", "0"),
    ({"bias": torch.zeros(V - 1)}, "bias", "(10,)"),
    ({"bias": torch.zeros(V, 1)}, "bias", "(11, 1)"),
    ({"bias": torch.zeros(V).double()}, "bias", "float64"),
    ({"bias": torch.zeros(V, device="meta")}, "bias", "meta"),
    ({"mask": torch.ones(2, 3)}, "mask", "float32"),
    ({"mask": torch.ones(2, 3).long()}, "mask", "int64"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, "mask", "(3,)"),
    ({"mask": torch.ones(2, 3, dtype=torch.bool, device="meta")}, "mask", "meta"),
]


def assert_refused(call: Callable[..., Any], arguments: dict[str, Any], name: str, got: str) -> None:
    with pytest.raises(ValueError) as caught:
        call(**arguments)
    message = str(caught.value)
    assert name in message.split(": expected")[0], message
    assert "expected" in message, message
    assert got in message, message


def ids(rows: list[tuple[dict[str, Any], str, str]]) -> list[str]:
    return [f"{'+'.join(changes)}={got}" for changes, _, got in rows]


@pytest.mark.parametrize(("changes", "name", "got"), SHARED + FROM_LOGITS, ids=ids(SHARED + FROM_LOGITS))
def test_token_stats_refuses(changes: dict[str, Any], name: str, got: str) -> None:
    assert_refused(flathead.token_stats, {"logits": LOGITS, "labels": LABELS, **changes}, name, got)


@pytest.mark.parametrize(("changes", "name", "got"), SHARED + FROM_HIDDEN, ids=ids(SHARED + FROM_HIDDEN))
def test_linear_token_stats_refuses(changes: dict[str, Any], name: str, got: str) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **changes}
    assert_refused(flathead.linear_token_stats, arguments, name, got)


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ((0, 4, 0, None), "0"),
        ((-1, 4, 8, None), "-1"),
        ((5, 4, 8, None), "5"),
        ((0, 4, 8, None), "group"),  # half a vocabulary and nobody to hold the rest
        ((0, 4.0, 4, None), "4.0"),
        ((False, 4, 4, None), "False"),
        ((0, 4, 4, "tp"), "'tp'"),
    ],
    ids=str,
)
def test_vocab_shard_refuses(arguments: tuple[Any, ...], got: str) -> None:
    with pytest.raises(ValueError, match="VocabShard") as caught:
        flathead.VocabShard(*arguments)
    assert got in str(caught.value)


def test_vocab_shard_from_group_refuses() -> None:
    with pytest.raises(ValueError, match=r"vocab_size.*0"):
        flathead.VocabShard.from_group(None, 8, 0)
    with pytest.raises(ValueError, match="vocab_size 9"):
        flathead.VocabShard.from_group(None, 8, 9)
    bad: Any
    for bad, message in (((None, "7", 3), "local_size"), ((None, True), "local_size"), (("tp", 7), "group")):
        with pytest.raises(ValueError, match=f"VocabShard.from_group: {message}: expected"):
            flathead.VocabShard.from_group(*bad)
    with pytest.raises(ValueError, match=r"VocabShard\.from_group: vocab_size: expected an int, got 7\.5"):
        flathead.VocabShard.from_group(None, 8, 7.5)  # type: ignore[arg-type]


def test_tensors_of_inference_mode_are_refused_where_autograd_cannot_keep_them() -> None:
    with torch.inference_mode():
        hidden, labels = HIDDEN.clone(), LABELS.clone()
    weight = WEIGHT.clone().requires_grad_()
    for arguments, name in (((hidden, weight, LABELS), "hidden"), ((HIDDEN, weight, labels), "labels")):
        with pytest.raises(ValueError, match=f"{name}: expected a tensor made outside torch.inference_mode"):
            flathead.linear_token_stats(*arguments)
    with pytest.raises(ValueError, match="labels: expected a tensor made outside"):
        flathead.token_stats(LOGITS.clone().requires_grad_(), labels)
    with torch.no_grad():
        assert flathead.linear_token_stats(hidden, weight, labels).log_prob is not None
    assert flathead.linear_token_stats(hidden, WEIGHT, labels).log_prob is not None


def test_a_temperature_that_wants_a_gradient_is_refused_not_ignored() -> None:
    temperature = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match="temperature"):
        flathead.token_stats(LOGITS, LABELS, temperature=temperature)
    with pytest.raises(ValueError, match="temperature"):
        flathead.linear_token_stats(HIDDEN, WEIGHT, LABELS, temperature=temperature)


def test_good_arguments_of_the_tables_are_accepted() -> None:
    """The tables change one argument of calls that work."""
    assert flathead.token_stats(LOGITS, LABELS).log_prob.shape == (2, 3)
    assert flathead.linear_token_stats(HIDDEN, WEIGHT, LABELS).log_prob.shape == (2, 3)


@pytest.mark.parametrize("argument", ["temperature", "softcap", "logit_scale"])
@pytest.mark.parametrize("value", [2e-39, 1e39, 10**400])
def test_numbers_that_fp32_does_not_hold_are_refused(argument: str, value: float) -> None:
    changed: dict[str, Any] = {argument: value}
    with pytest.raises(ValueError, match=argument):
        flathead.token_stats(LOGITS, LABELS, **changed)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"logit_scale": 1e20, "temperature": 1e-20}, "temperature"),
        ({"logit_scale": 1e-20, "temperature": 1e20}, "temperature"),
        ({"logit_scale": 1e20, "temperature": torch.tensor(1e-20)}, "temperature"),
        ({"logit_scale": 1e20, "softcap": 1e-20}, "softcap"),
    ],
)
def test_ratios_that_fp32_does_not_hold_are_refused(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected logit_scale / {name} that fp32 holds"):
        flathead.token_stats(LOGITS, LABELS, **arguments)
    with pytest.raises(ValueError, match=f"{name}: expected logit_scale / {name} that fp32 holds"):
        flathead.linear_token_stats(HIDDEN, WEIGHT, LABELS, **arguments)


@pytest.mark.parametrize("value", [torch.tensor(2e-39), torch.tensor(2 + 5j), torch.tensor(True)])
def test_temperature_tensors_that_are_no_positive_real_number_are_refused(value: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="temperature"):
        flathead.token_stats(LOGITS, LABELS, temperature=value)


def test_hidden_states_without_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden\.shape"):
        flathead.linear_token_stats(torch.zeros(2, 0), torch.zeros(5, 0), torch.tensor([0, 1]))
