"""The autograd function of `token_stats`: from logits, whole or the local shard of the vocabulary."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flathead import kernels, vocab_math
from flathead.arguments import Options
from flathead.chunking import RowLayout, row_chunks, rows_per_chunk
from flathead.overwriting import mark_overwritten
from flathead.vocab_math import Scaling
from flathead.vocab_shard import VocabShard


def outputs(values: dict[str, Tensor], stats: tuple[str, ...], layout: RowLayout, ignored_N: Tensor | None) -> tuple:
    """Statistics (*layout.shape) -> new tensors of the caller's leading shape, 0 in ignored rows."""
    kept = (values[name].clone() if ignored_N is None else values[name].masked_fill(ignored_N, 0.0) for name in stats)
    return tuple(layout.restore(value).contiguous() for value in kept)


def upstream(ctx: Any, grads: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    """The gradients that arrived, by name of their statistic."""
    return {name: g for name, g in zip(ctx.options.stats, grads, strict=True) if g is not None}


class LogitsStats(torch.autograd.Function):
    """logits (..., V_local) -> the asked statistics, each (...). Saves its inputs and at most 20 bytes a row."""

    @staticmethod
    def forward(  # type: ignore[override]  # torch declares it variadic
        ctx: Any,
        logits: Tensor,
        labels: Tensor | None,
        ignored: Tensor | None,
        scaling: Scaling,
        shard: VocabShard,
        options: Options,
    ) -> tuple[Tensor, ...]:
        layout = RowLayout(logits)
        logits_NV = layout.view(logits)[..., : shard.live]
        label_N = None if labels is None else layout.per_row(labels) - shard.start
        scaling = scaling.map(layout.per_row)
        kernel = kernels.resolve(options.impl)
        partials_5N = vocab_math.empty_partials(layout.shape, vocab_math.accumulate_dtype(logits.dtype), logits.device)
        rows = rows_per_chunk(logits, options.chunk_size, options.memory_budget)
        for at in row_chunks(layout.shape, rows):
            label = None if label_N is None else label_N[at]
            partials_5N[(slice(None), *at)] = kernel.partials(logits_NV[at], label, scaling.rows(at), options.stats)
        partials_5N = shard.merge_over_group(partials_5N, scaling.beta)
        values, ln_s_N = vocab_math.finish(partials_5N, scaling.beta, options.stats, shard.vocab_size)

        ctx.save_for_backward(
            logits, labels, ignored, partials_5N[0].clone(), ln_s_N, values.get("entropy"), values.get("sum_pi_squared")
        )
        ctx.scaling, ctx.shard, ctx.options, ctx.rows = scaling, shard, options, rows
        ctx.set_materialize_grads(False)
        return outputs(values, options.stats, layout, None if ignored is None else layout.per_row(ignored))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # type: ignore[override]  # torch declares it variadic
        arrived = upstream(ctx, grads)
        if not arrived:
            return (None,) * 6
        logits, labels, ignored, m_N, ln_s_N, entropy_N, sum_pi_squared_N = ctx.saved_tensors
        layout, live, inplace = RowLayout(logits), ctx.shard.live, ctx.options.inplace_backward
        arrived = {name: layout.per_row(g).to(m_N.dtype) for name, g in arrived.items()}
        coefficients = vocab_math.row_coefficients(arrived, ln_s_N, entropy_N, sum_pi_squared_N)
        label_N = None if labels is None else layout.per_row(labels) - ctx.shard.start
        ignored_N = None if ignored is None else layout.per_row(ignored)
        logits_NV = layout.view(logits)
        grad_NV = logits_NV.detach() if inplace else logits.new_empty((*layout.shape, logits.shape[-1]))
        grad_NV[..., live:].zero_()
        kernel = kernels.resolve(ctx.options.impl)
        for at in row_chunks(layout.shape, ctx.rows):
            label, out = None if label_N is None else label_N[at], grad_NV[at][..., :live]
            kernel.row_gradient(
                logits_NV[at][..., :live], label, m_N[at], ln_s_N[at], coefficients.rows(at), ctx.scaling.rows(at), out
            )
            if ignored_N is not None:  # not left to a coefficient of 0: an ignored row may hold nan
                out.masked_fill_(ignored_N[at].unsqueeze(-1), 0.0)
        if inplace:
            mark_overwritten(logits)
            return logits.detach(), *(None,) * 5
        return layout.restore(grad_NV), *(None,) * 5
