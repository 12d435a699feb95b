"""`inplace_backward`: whatever is not safe to overwrite, or was overwritten, is refused, through any view of it."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flathead

N, V = 6, 11
LABELS = torch.arange(N)


def fresh() -> Tensor:
    return torch.randn(N, V, generator=torch.Generator().manual_seed(3))


def overwrite(logits: Tensor, labels: Tensor) -> None:
    leaf = logits if logits.requires_grad else logits.requires_grad_()
    flathead.token_stats(leaf, labels, inplace_backward=True).log_prob.sum().backward()  # type: ignore[union-attr]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda logits: logits,
    "detached": lambda logits: logits.detach(),
    "reshaped": lambda logits: logits.view(2, 3, V),
    "some rows": lambda logits: logits[2:4],
    "some columns": lambda logits: logits[:, 3:],
    "data": lambda logits: logits.data,
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("first", VIEWS)
@pytest.mark.parametrize("second", VIEWS)
def test_a_second_use_is_refused_through_any_view(first: str, second: str, inplace: bool) -> None:
    logits = fresh()
    view = VIEWS[first](logits)
    overwrite(view, torch.ones(view.shape[:-1], dtype=torch.int64))
    del view
    gc.collect()
    again = VIEWS[second](logits)
    labels = torch.ones(again.shape[:-1], dtype=torch.int64)
    with pytest.raises(ValueError, match="inplace_backward: expected a tensor not used before"):
        flathead.token_stats(again, labels, inplace_backward=inplace)


def test_rows_apart_may_be_overwritten_one_after_another() -> None:
    expected, logits = fresh().requires_grad_(), fresh()
    flathead.token_stats(expected, LABELS).log_prob.sum().backward()  # type: ignore[union-attr]
    for start in range(0, N, 2):
        overwrite(logits[start : start + 2], LABELS[start : start + 2])
    assert expected.grad is not None and torch.equal(logits, expected.grad)
    for start in range(0, N, 2):  # each of them is remembered, not the last alone
        with pytest.raises(ValueError, match="inplace_backward"):
            flathead.token_stats(logits[start : start + 1], LABELS[:1])


def test_a_write_elsewhere_does_not_hide_what_was_overwritten() -> None:
    both = torch.stack([fresh(), fresh()])
    overwrite(both[0].detach(), LABELS)
    both[1].copy_(fresh() + 1)
    with pytest.raises(ValueError, match="inplace_backward"):
        flathead.token_stats(both[0], LABELS)
    assert flathead.token_stats(both[1], LABELS).entropy is not None


def test_columns_side_by_side_are_apart() -> None:
    left, right = torch.randn(N, 2 * V).split(V, -1)
    overwrite(left.detach(), LABELS)
    overwrite(right.detach(), LABELS)
    for part in (left, right):
        with pytest.raises(ValueError, match="inplace_backward"):
            flathead.token_stats(part, LABELS)


def test_rows_whose_gradient_is_zero_may_be_filled_with_zeros() -> None:
    logits = fresh()
    overwrite(logits, torch.full((N,), -100))
    assert not logits.detach().any()
    with pytest.raises(ValueError, match="inplace_backward"):
        flathead.token_stats(logits, LABELS)
    with torch.no_grad():
        logits.zero_()
    assert flathead.token_stats(logits, LABELS).entropy is not None


def test_memory_filled_anew_may_be_used_again() -> None:
    logits = fresh()
    overwrite(logits.view(2, 3, V), LABELS.view(2, 3))
    with torch.no_grad():
        logits.copy_(fresh())
    torch.testing.assert_close(
        flathead.token_stats(logits, LABELS).entropy, flathead.token_stats(fresh(), LABELS).entropy
    )
    overwrite(logits, LABELS)
    logits.data.copy_(fresh())  # which has a version counter of its own
    torch.testing.assert_close(
        flathead.token_stats(logits, LABELS).entropy, flathead.token_stats(fresh(), LABELS).entropy
    )


def test_rows_that_share_memory_are_refused() -> None:
    steps = torch.randn(40)
    for rows in (steps.unfold(0, V, 3)[:N], fresh()[:1].expand(N, V), torch.as_strided(steps, (N, V), (1, 2))):
        with pytest.raises(ValueError, match="inplace_backward: expected memory of its own for every element"):
            flathead.token_stats(rows, LABELS, inplace_backward=True)
    for rows in (fresh().T.contiguous().T, torch.randn(N, 2, V)[:, 0], torch.randn(N, 2 * V)[:, ::2]):  # these do not
        overwrite(rows.detach(), LABELS)


def test_hidden_states_inside_the_head_are_refused() -> None:
    weight = torch.randn(V, 4)
    for hidden, bias in ((weight[:N], None), (torch.zeros(N, 4), None)):
        arguments = {"bias": bias, "inplace_backward": True}
        if hidden.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
            with pytest.raises(ValueError, match="inplace_backward: expected memory that weight does not share"):
                flathead.linear_token_stats(hidden, weight, LABELS, **arguments)
        else:
            flathead.linear_token_stats(hidden, weight, LABELS, **arguments)
    both = torch.randn(N * 4 + V)
    with pytest.raises(ValueError, match="memory that bias does not share"):
        flathead.linear_token_stats(
            both[: N * 4].view(N, 4), weight, LABELS, bias=both[N * 4 - 1 : -1], inplace_backward=True
        )


def test_linear_remembers_too() -> None:
    hidden, weight = torch.randn(N, 4), torch.randn(V, 4)
    flathead.linear_token_stats(
        hidden.view(2, 3, 4).requires_grad_(), weight, LABELS.view(2, 3), inplace_backward=True
    ).log_prob.sum().backward()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="inplace_backward"):
        flathead.linear_token_stats(hidden, weight, LABELS)
