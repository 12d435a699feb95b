"""The autograd function of `linear_token_stats`: from hidden states and the head's weight, tile by tile."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flathead import kernels, vocab_math
from flathead.arguments import Options
from flathead.chunking import RowLayout, Tiles, head_tiles, row_chunks
from flathead.logits_stats import outputs, upstream
from flathead.overwriting import mark_overwritten
from flathead.vocab_math import RowCoefficients, Scaling
from flathead.vocab_shard import VocabShard


class Tokens(NamedTuple):
    """The M live rows of hidden (..., H), in pieces of a tile each: where they are, and their place among the M."""

    hidden: Tensor  # (*layout.shape, H)
    dtype: torch.dtype
    pieces: list[tuple[tuple, slice]]

    @classmethod
    def of(
        cls, hidden: Tensor, layout: RowLayout, index: tuple[Tensor, ...] | None, tokens: int, dtype: torch.dtype
    ) -> "Tokens":
        """`index`: the live rows, one tensor (M) per dimension of the layout; None: every row."""
        pieces: list[tuple[tuple, slice]] = []
        if index is not None:
            for start in range(0, len(index[0]), tokens):
                stop = min(start + tokens, len(index[0]))
                pieces.append((tuple(part[start:stop] for part in index), slice(start, stop)))
        else:
            start = 0
            for at in row_chunks(layout.shape, tokens):
                stop = start + torch.empty(layout.shape, device="meta")[at].numel()
                pieces.append((at, slice(start, stop)))
                start = stop
        return cls(layout.view(hidden), dtype, pieces)

    def tile(self, at: tuple) -> Tensor:
        """(C, H) in the computing dtype."""
        return self.hidden[at].reshape(-1, self.hidden.shape[-1]).to(self.dtype)


class Head(NamedTuple):
    """The live columns of this rank's head, cut into tiles."""

    weight: Tensor  # (V_live, H)
    bias: Tensor | None  # (V_live)
    dtype: torch.dtype
    tiles: Tiles

    def columns(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        for start in range(0, len(self.weight), self.tiles.columns):
            at = slice(start, min(start + self.tiles.columns, len(self.weight)))
            yield at, self.weight[at].to(self.dtype), None if self.bias is None else self.bias[at].to(self.dtype)

    def new_logits(self, device: torch.device) -> Tensor:
        return torch.empty(self.tiles.tokens * self.tiles.columns, dtype=self.dtype, device=device)


def _logits_into(buffer: Tensor, hidden_CH: Tensor, weight_WH: Tensor, bias_W: Tensor | None) -> Tensor:
    """logits (C, W) = hidden @ weight.T + bias, in the buffer. The same call in both passes, so the same bits."""
    tile_CW = buffer[: len(hidden_CH) * len(weight_WH)].view(len(hidden_CH), len(weight_WH))
    if bias_W is None:
        return torch.mm(hidden_CH, weight_WH.T, out=tile_CW)
    return torch.addmm(bias_W, hidden_CH, weight_WH.T, out=tile_CW)


def _add_product(total: Tensor, a: Tensor, b: Tensor, product: Tensor) -> None:
    """total += a @ b, where the sum is kept in fp32 although the product, in a buffer, may be computed in bf16."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
        return
    torch.mm(a, b, out=product)
    for some, others in zip(total.split(_ROWS_ADDED), product.split(_ROWS_ADDED), strict=True):
        some.add_(others)  # a sum of two dtypes casts one as a whole: a few rows at a time, that stays in the cache


_ROWS_ADDED = 128


class HeadStats(torch.autograd.Function):
    """hidden (..., H), weight (V_local, H) -> the asked statistics, each (...).

    The vocabulary tile is the outer loop: a weight-gradient tile is finished, cast and written before the next begins.
    """

    @staticmethod
    def forward(  # type: ignore[override]  # torch declares it variadic
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor | None,
        live: Tensor | None,
        scaling: Scaling,
        shard: VocabShard,
        options: Options,
        dtype: torch.dtype,
        main_grad: Tensor | None,
    ) -> tuple[Tensor, ...]:
        layout = RowLayout(hidden)
        index = None if live is None else layout.per_row(live).nonzero(as_tuple=True)
        pick = (lambda v: layout.per_row(v).flatten()) if index is None else (lambda v: layout.per_row(v)[index])
        label_M = None if labels is None else pick(labels) - shard.start
        scaling, rows = scaling.map(pick), layout.count if index is None else len(index[0])
        tiles = head_tiles(rows, shard.live, weight, dtype, options.chunk_size, options.memory_budget)
        head = Head(weight[: shard.live], None if bias is None else bias[: shard.live], dtype, tiles)
        tokens = Tokens.of(hidden, layout, index, tiles.tokens, dtype)
        partials_5M = _partials(tokens, head, label_M, scaling, options, (rows,))
        partials_5M = shard.merge_over_group(partials_5M, scaling.beta)
        values, ln_s_M = vocab_math.finish(partials_5M, scaling.beta, options.stats, shard.vocab_size)

        entropy_M, sum_pi_squared_M = values.get("entropy"), values.get("sum_pi_squared")
        ctx.save_for_backward(
            hidden, weight, bias, label_M, partials_5M[0].clone(), ln_s_M, entropy_M, sum_pi_squared_M
        )
        ctx.index, ctx.scaling, ctx.shard, ctx.options, ctx.tiles, ctx.dtype = (
            index,
            scaling,
            shard,
            options,
            tiles,
            dtype,
        )
        ctx.main_grad = main_grad
        ctx.set_materialize_grads(False)
        if index is None:
            values = {name: value.view(layout.shape) for name, value in values.items()}
        else:
            values = {name: value.new_zeros(layout.shape).index_put_(index, value) for name, value in values.items()}
        return outputs(values, options.stats, layout, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # type: ignore[override]  # torch declares it variadic
        arrived = upstream(ctx, grads)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        if not arrived:
            return (None,) * 10
        hidden, weight, bias, label_M, m_M, ln_s_M, entropy_M, sum_pi_squared_M = ctx.saved_tensors
        layout, live, index = RowLayout(hidden), ctx.shard.live, ctx.index
        pick = (lambda v: layout.per_row(v).flatten()) if index is None else (lambda v: layout.per_row(v)[index])
        arrived = {name: pick(g).to(m_M.dtype) for name, g in arrived.items()}
        coefficients = vocab_math.row_coefficients(arrived, ln_s_M, entropy_M, sum_pi_squared_M)
        head = Head(weight[:live], None if bias is None else bias[:live], ctx.dtype, ctx.tiles)
        tokens = Tokens.of(hidden, layout, index, ctx.tiles.tokens, ctx.dtype)
        rows = Rows(label_M, m_M, ln_s_M, coefficients, ctx.scaling)
        grad_MH = m_M.new_zeros((len(m_M), hidden.shape[-1])) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight and ctx.main_grad is None else None
        grad_bias = torch.empty_like(bias) if need_bias and bias is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            _gradients(
                tokens, head, rows, kernels.resolve(ctx.options.impl), grad_MH, grad_weight, grad_bias, ctx.main_grad
            )
        grad_hidden = None
        if grad_MH is not None:
            grad_hidden = _scatter(
                ctx.shard.sum_over_group(grad_MH), hidden, layout, index, ctx.options.inplace_backward
            )
            if ctx.options.inplace_backward:
                mark_overwritten(hidden)
        return grad_hidden, grad_weight, grad_bias, *(None,) * 7


class Rows(NamedTuple):
    """What the backward knows of each of the M live rows."""

    label_M: Tensor | None
    m_M: Tensor
    ln_s_M: Tensor
    coefficients: RowCoefficients
    scaling: Scaling


def _partials(
    tokens: Tokens, head: Head, label_M: Tensor | None, scaling: Scaling, options: Options, shape: tuple[int, ...]
) -> Tensor:
    """(5, M): the partials of every live row over this rank's columns."""
    kernel, device = kernels.resolve(options.impl), tokens.hidden.device
    total_5M = vocab_math.empty_partials(shape, vocab_math.accumulate_dtype(head.dtype), device)
    buffer = head.new_logits(device)
    for columns, weight_WH, bias_W in head.columns():
        for at, place in tokens.pieces:
            logits_CW = _logits_into(buffer, tokens.tile(at), weight_WH, bias_W)
            for chunk, row in _chunks(place, head.tiles.rows):
                label = None if label_M is None else label_M[row] - columns.start
                part_5R = kernel.partials(logits_CW[chunk], label, scaling.rows(row), options.stats)
                total_5M[:, row] = vocab_math.merge(total_5M[:, row], part_5R, scaling.rows(row).beta)
    return total_5M


def _gradients(
    tokens: Tokens,
    head: Head,
    rows: Rows,
    kernel: Any,
    grad_MH: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    main_grad: Tensor | None,
) -> None:
    """Fill the gradients: hidden's in fp32 over all columns, weight's and bias's tile by tile; add to `main_grad`."""
    buffer, acc = head.new_logits(tokens.hidden.device), vocab_math.accumulate_dtype(head.dtype)
    product = buffer.new_empty((head.tiles.tokens, tokens.hidden.shape[-1]))
    product_WH = buffer.new_empty((head.tiles.columns, product.shape[1])) if main_grad is not None else product
    direct = len(tokens.pieces) == 1 and grad_weight is not None and grad_weight.dtype == head.dtype
    for columns, weight_WH, bias_W in head.columns():
        grad_WH = None
        grad_W = None if grad_bias is None else torch.zeros(len(weight_WH), dtype=acc, device=buffer.device)
        for at, place in tokens.pieces:
            hidden_CH = tokens.tile(at)
            logits_CW = _logits_into(buffer, hidden_CH, weight_WH, bias_W)
            for chunk, row in _chunks(place, head.tiles.rows):
                label = None if rows.label_M is None else rows.label_M[row] - columns.start
                values = rows.m_M[row], rows.ln_s_M[row], rows.coefficients.rows(row), rows.scaling.rows(row)
                kernel.row_gradient(logits_CW[chunk], label, *values, logits_CW[chunk])
            if grad_MH is not None:
                _add_product(grad_MH[place], logits_CW, weight_WH, product[: len(hidden_CH)])
            if grad_weight is not None and direct:
                torch.mm(logits_CW.T, hidden_CH, out=grad_weight[columns])
            elif main_grad is not None:
                _add_product(main_grad[columns], logits_CW.T, hidden_CH, product_WH[: len(weight_WH)])
            elif grad_weight is not None:
                grad_WH = _running_product(grad_WH, logits_CW.T, hidden_CH, acc)
            if grad_W is not None:
                grad_W += logits_CW.sum(0, dtype=acc)
        if grad_weight is not None and not direct:
            grad_weight[columns] = 0.0 if grad_WH is None else grad_WH
        if grad_bias is not None and grad_W is not None:
            grad_bias[columns] = grad_W
    for padding in (grad_weight, grad_bias):
        if padding is not None:
            padding[len(head.weight) :].zero_()


def _running_product(total: Tensor | None, a: Tensor, b: Tensor, acc: torch.dtype) -> Tensor:
    """total + a @ b; a lone product, one token tile, needs no fp32 sum."""
    product = torch.mm(a, b)
    return product if total is None else total.to(acc).add_(product)


def _chunks(place: slice, rows: int) -> Iterator[tuple[slice, slice]]:
    """The rows of one tile, `rows` at a time: their place in the tile, and among the M."""
    for start in range(place.start, place.stop, rows):
        stop = min(start + rows, place.stop)
        yield slice(start - place.start, stop - place.start), slice(start, stop)


def _scatter(grad_MH: Tensor, hidden: Tensor, layout: RowLayout, index: tuple | None, inplace: bool) -> Tensor:
    """The fp32 gradient of the live rows (M, H) -> hidden's shape and dtype, 0 in the others."""
    grad = layout.view(hidden.detach()) if inplace else None
    if index is None:
        whole = grad_MH.view(*layout.shape, grad_MH.shape[1])
        grad = whole.to(hidden.dtype) if grad is None else grad.copy_(whole)
    else:
        grad = hidden.new_zeros((*layout.shape, hidden.shape[-1])) if grad is None else grad.zero_()
        grad[index] = grad_MH.to(hidden.dtype)
    return hidden.detach() if inplace else layout.restore(grad)
