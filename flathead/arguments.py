"""Bad input is refused here, before any work: every error names the argument, what was expected and what came."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flathead import kernels
from flathead.vocab_math import STATS, Scaling, accumulate_dtype
from flathead.vocab_shard import VocabShard, is_dtensor


class Options(NamedTuple):
    """What `token_stats` and `linear_token_stats` share, checked; travels as one object."""

    stats: tuple[str, ...]
    softcap: float | None
    logit_scale: float
    ignore_index: int
    chunk_size: int | None
    memory_budget: int | None
    inplace_backward: bool
    impl: str


def require(condition: bool, name: str, expected: object, got: object) -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def _is_positive(value: object) -> bool:
    """A number that fp32, in which it is used, holds with full precision."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _SMALLEST <= value <= _LARGEST


def check_stats(stats: Any) -> None:
    require(isinstance(stats, tuple | list) and len(stats) > 0, "stats", f"one or more of {STATS}", repr(stats))
    for name in stats:
        require(name in STATS, "stats", f"names out of {STATS}", repr(name))


def check_options(options: Options) -> Options:
    stats = options.stats
    check_stats(stats)
    for name in ("chunk_size", "memory_budget"):
        value = getattr(options, name)
        require(value is None or (_is_int(value) and value > 0), name, "a positive int or None", repr(value))
    cap, scale = options.softcap, options.logit_scale
    positive = "a positive finite number"
    require(cap is None or _is_positive(cap), "softcap", positive + " or None", repr(cap))
    require(_is_positive(scale), "logit_scale", positive, repr(scale))
    ignore = options.ignore_index
    require(_is_int(ignore) and -(2**63) <= ignore < 2**63, "ignore_index", "an int that int64 holds", repr(ignore))
    require(isinstance(options.inplace_backward, bool), "inplace_backward", "a bool", repr(options.inplace_backward))
    kernels.resolve(options.impl)
    return options._replace(stats=tuple(name for name in STATS if name in stats))


def check_floating(name: str, tensor: object) -> None:
    require(isinstance(tensor, Tensor), name, "a tensor", type(tensor).__name__)
    assert isinstance(tensor, Tensor)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    require(tensor.dtype in floats, f"{name}.dtype", "float16, bfloat16, float32 or float64", tensor.dtype)
    check_dense(name, tensor)
    require(tensor.ndim >= 1, f"{name}.shape", "at least one dimension", tuple(tensor.shape))


def check_dense(name: str, tensor: Tensor) -> None:
    require(tensor.layout == torch.strided, f"{name}.layout", "torch.strided", tensor.layout)
    require(not tensor.is_meta, f"{name}.device", "a device with data", "meta")
    require(not tensor.is_nested, name, "an ordinary tensor", "a nested one; pass its values()")


def check_not_inference(gradient_wanted: bool, **tensors: Tensor | None) -> None:
    """Autograd cannot keep a tensor made under inference_mode for backward."""
    for name, tensor in tensors.items():
        require(
            tensor is None or not (gradient_wanted and tensor.is_inference()),
            name,
            "a tensor made outside torch.inference_mode, since another argument needs a gradient",
            "one made inside; use torch.no_grad there, or pass its .clone()",
        )


def check_labels(labels: Tensor | None, lead: torch.Size, like: Tensor, options: Options) -> None:
    """Shape, dtype and device; the range is checked by `check_label_range`, where the vocabulary is known."""
    if labels is None:
        require("log_prob" not in options.stats, "labels", "a tensor, since log_prob is asked for", "None")
        return
    require(isinstance(labels, Tensor), "labels", "an int64 tensor", type(labels).__name__)
    require(labels.dtype == torch.int64, "labels.dtype", "torch.int64", labels.dtype)
    check_dense("labels", labels)
    check_plain("labels", labels)
    require(labels.shape == lead, "labels.shape", f"{tuple(lead)}, the leading shape", tuple(labels.shape))
    require(labels.device == like.device, "labels.device", like.device, labels.device)


def check_label_range(labels: Tensor | None, mask: Tensor | None, vocab_size: int, ignore_index: int) -> Tensor | None:
    """Labels of live rows lie in [0, vocab_size), padding excluded. Returns which rows are ignored; None: none."""
    if labels is None or labels.numel() == 0:
        return None
    ignored = labels == ignore_index
    bad = ((labels < 0) | (labels >= vocab_size)) & ~ignored
    if mask is not None:
        bad &= mask
    if bad.any():
        expected = f"ids in [0, {vocab_size}) or ignore_index {ignore_index}"
        require(False, "labels", expected, f"{labels[bad][0].item()} at index {tuple(bad.nonzero()[0].tolist())}")
    return ignored if bool(ignored.any()) else None


def check_mask(mask: Tensor | None, lead: torch.Size, like: Tensor) -> None:
    if mask is None:
        return
    require(isinstance(mask, Tensor), "mask", "a bool tensor", type(mask).__name__)
    require(mask.dtype == torch.bool, "mask.dtype", "torch.bool", mask.dtype)
    check_dense("mask", mask)
    check_plain("mask", mask)
    require(mask.shape == lead, "mask.shape", f"{tuple(lead)}, the leading shape", tuple(mask.shape))
    require(mask.device == like.device, "mask.device", like.device, mask.device)


def check_shard(shard: VocabShard | None, width: int, vocab_size: int | None, name: str) -> VocabShard:
    """The shard of a tensor with `width` local columns; `vocab_size` alone means one rank with padding at the end."""
    if vocab_size is not None:
        require(_is_int(vocab_size) and vocab_size > 0, "vocab_size", "a positive int or None", repr(vocab_size))
    if shard is None:
        require(width > 0, f"{name}.shape", "at least one column of vocabulary", width)
        if vocab_size is not None:
            require(vocab_size <= width, "vocab_size", f"at most the {width} columns of {name}", vocab_size)
        return VocabShard(0, width, vocab_size or width)
    require(isinstance(shard, VocabShard), "shard", "a flathead.VocabShard or None", type(shard).__name__)
    require(width == shard.width, f"{name}.shape", f"{shard.width} columns as the shard says", width)
    if vocab_size is not None:
        require(vocab_size == shard.vocab_size, "vocab_size", f"{shard.vocab_size} as the shard says", vocab_size)
    return shard


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """hidden (..., H), weight (V_local, H), bias (V_local): returns the dtype their product is computed in.

    fp16 is computed in fp32: it neither holds logits past 65504 nor the small entries of their gradient."""
    require(weight.ndim == 2, "weight.shape", "(V_local, H)", tuple(weight.shape))
    width = hidden.shape[-1]
    require(width > 0, "hidden.shape", "at least one feature", tuple(hidden.shape))
    require(
        weight.shape[1] == width, "weight.shape", f"(V_local, {width}), as hidden has H = {width}", tuple(weight.shape)
    )
    require(weight.device == hidden.device, "weight.device", hidden.device, weight.device)
    if bias is not None:
        check_floating("bias", bias)
        require(bias.shape == weight.shape[:1], "bias.shape", tuple(weight.shape[:1]), tuple(bias.shape))
        require(bias.device == hidden.device, "bias.device", hidden.device, bias.device)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return torch.float32 if dtype == torch.float16 else dtype
    require(weight.dtype == hidden.dtype, "weight.dtype", f"{hidden.dtype} as hidden, or autocast", weight.dtype)
    if bias is not None:
        require(bias.dtype == hidden.dtype, "bias.dtype", f"{hidden.dtype} as hidden, or autocast", bias.dtype)
    return torch.float32 if hidden.dtype == torch.float16 else hidden.dtype


def check_main_grad(main_grad: Tensor | None, weight: Tensor) -> None:
    if main_grad is None:
        return
    check_floating("main_grad", main_grad)
    check_plain("main_grad", main_grad)
    require(not main_grad.is_inference(), "main_grad", "a tensor made outside torch.inference_mode", "one made inside")
    require(main_grad.shape == weight.shape, "main_grad.shape", f"{tuple(weight.shape)}", tuple(main_grad.shape))
    require(main_grad.device == weight.device, "main_grad.device", weight.device, main_grad.device)
    require(
        weight.requires_grad and not main_grad.requires_grad,
        "main_grad",
        "a buffer without gradient, and a weight that requires one",
        f"requires_grad {main_grad.requires_grad} and {weight.requires_grad}",
    )


def check_temperature(temperature: object) -> None:
    """What can be said of a temperature alone; its shape and a tensor's values are checked by `scaling_of`."""
    if not isinstance(temperature, Tensor):
        require(_is_positive(temperature), "temperature", "a positive finite number or tensor", repr(temperature))
        return
    check_plain("temperature", temperature)
    real = not (temperature.is_complex() or temperature.dtype == torch.bool)
    require(real, "temperature.dtype", "a floating or integer dtype", temperature.dtype)
    require(
        not temperature.requires_grad, "temperature", "a tensor without gradient; call .detach()", "requires_grad=True"
    )


def check_plain(name: str, tensor: Tensor) -> None:
    require(not is_dtensor(tensor), name, "a DTensor only beside DTensor logits or weight", "one; pass .to_local()")


def scaling_of(temperature: float | Tensor, lead: torch.Size, like: Tensor, options: Options) -> Scaling:
    """The way from logits to x; a temperature tensor is broadcast to `lead`, in the accumulation dtype."""
    scale = 1.0 if options.softcap is not None else float(options.logit_scale)
    inner = float(options.logit_scale) if options.softcap is not None else 1.0
    cap = None if options.softcap is None else float(options.softcap)
    check_temperature(temperature)
    if cap is not None:
        require(_is_positive(inner / cap), "softcap", "logit_scale / softcap that fp32 holds", f"{inner} / {cap}")
    if not isinstance(temperature, Tensor):
        beta = scale / float(temperature)
        require(_is_positive(beta), "temperature", "logit_scale / temperature that fp32 holds", f"{beta}")
        return Scaling(beta, cap, inner)
    require(
        temperature.device == like.device or temperature.ndim == 0,
        "temperature.device",
        like.device,
        temperature.device,
    )
    try:
        values = temperature.to(like.device, accumulate_dtype(like.dtype)).expand(lead)
    except RuntimeError:
        raise ValueError(
            f"temperature.shape: expected to broadcast to {tuple(lead)}, got {tuple(temperature.shape)}"
        ) from None
    if not values.is_meta and values.numel():
        fine = (values >= _SMALLEST) & (values <= _LARGEST)
        require(bool(fine.all()), "temperature", "positive finite values", values[~fine][:1].tolist())
        fine = (scale / values >= _SMALLEST) & (scale / values <= _LARGEST)
        got = f"{scale} / {values[~fine][:1].tolist()}"
        require(bool(fine.all()), "temperature", "logit_scale / temperature that fp32 holds", got)
    return Scaling(scale / values, cap, inner)
