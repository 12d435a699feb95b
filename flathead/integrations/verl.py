"""Flathead inside verl: `VERL_USE_EXTERNAL_MODULES=flathead.integrations.verl`, or in the configuration
`actor_rollout_ref.model.external_lib=flathead.integrations.verl`. Every worker then imports this module before it
builds an engine, and importing it applies it.

Replaced are verl's functions of the vocabulary (`verl_stats`) and the engines' methods that call them (`verl_engines`):
FSDP, VeOmni, Automodel, TorchTitan and Megatron, each where its package is installed. All of it or, if a name or a
signature is not what it was in the verl this was tested with, nothing.
"""

# pyright: reportMissingImports=false
# verl is not installed where this is checked.

import logging
from collections.abc import Callable
from typing import Any

from flathead.integrations import verl_engines, verl_stats
from flathead.integrations.replacing import Replacement, Site, parameters_of

log = logging.getLogger("flathead")

_FUNCTIONS, _PARALLEL = "verl.utils.torch_functional", "verl.utils.megatron.tensor_parallel"
_KERNEL, _FUSED = "verl.utils.kernel.linear_cross_entropy", "verl.models.mcore.model_forward_fused"
_ENGINES = "verl.workers.engine"


def _site(owner: str, name: str, parameters: str, new: Callable[..., Any], **kwargs: Any) -> Site:
    return Site(owner, name, tuple(parameters.split()), new, **kwargs)


def _function_sites() -> list[Site]:
    same_name = {
        "logprobs_from_logits": "logits labels inplace_backward",
        "logprobs_from_logits_naive": "logits labels",
        "logprobs_from_logits_v2": "logits labels",
        "entropy_from_logits": "logits",
        "entropy_from_logits_with_chunking": "logits chunk_size",
        "calculate_sum_pi_squared_from_logits": "logits",
    }
    head = "self hidden_states vocab_weights input_ids temperature"
    return [
        *(_site(_FUNCTIONS, name, given, getattr(verl_stats, name)) for name, given in same_name.items()),
        _site(
            "verl.utils.experimental.torch_functional:FusedLinearForPPO",
            "forward",
            head,
            verl_stats.fused_linear_for_ppo,
        ),
        # The name is an autograd function's `apply`; what that takes is compared in `_check`.
        _site(_KERNEL, "linear_cross_entropy", "cls args kwargs", verl_stats.linear_cross_entropy),
    ]


def _engine_sites(owner: str, step: str, outputs: str, make_outputs: Callable[[Any], Any]) -> list[Site]:
    return [
        _site(owner, "forward_step", step, verl_engines.forward_step, wraps=True),
        _site(owner, "prepare_model_outputs", outputs, make_outputs, wraps=True),
    ]


def _megatron_sites() -> list[Site]:
    owner = f"{_ENGINES}.megatron.transformer_impl:MegatronEngineWithLMHead"
    step = "self batch_iter model logits_processor_func postprocess_micro_batch_func"
    head = "self logits label temperature calculate_sum_pi_squared calculate_entropy distillation_use_topk"
    head += " distillation_only logits_processor_func batch data_format"
    packed = "output packed_seq_params input_ids batch_size post_process local_cp_size cp_layout"
    same_name = {
        "vocab_parallel_entropy": "vocab_parallel_logits",
        "vocab_parallel_entropy_with_chunking": "vocab_parallel_logits chunk_size",
        "vocab_parallel_sum_pi_squared": "vocab_parallel_logits",
        "vocab_parallel_log_probs_from_logits": "logits labels",
    }
    return [
        *(_site(_PARALLEL, name, given, getattr(verl_stats, name)) for name, given in same_name.items()),
        _site(owner, "forward_step", step, verl_engines.megatron_forward_step, wraps=True),
        _site(owner, "_lm_head_logits_processor", head, verl_engines.lm_head_logits_processor, wraps=True),
        _site(
            _FUSED, "postprocess_thd_engine", packed, verl_engines.postprocess_thd_engine, wraps=True, only_here=True
        ),
    ]


def _sites() -> tuple[Site, ...]:
    """Of this installation: an engine whose package is missing, verl itself leaves out and warns of."""
    from verl.workers import engine

    step, outputs = "self micro_batch loss_function forward_only", "self output output_args micro_batch"
    owner = f"{_ENGINES}.{{}}.transformer_impl:{{}}EngineWithLMHead"
    fsdp = _engine_sites(
        owner.format("fsdp", "FSDP"), step, f"{outputs} logits_processor_func", verl_engines.fsdp_outputs
    )
    titan = _engine_sites(
        owner.format("torchtitan", "TorchTitan"),
        step,
        "self logits output_args micro_batch",
        verl_engines.torchtitan_outputs,
    )
    automodel = _engine_sites(owner.format("automodel", "Automodel"), step, outputs, verl_engines.automodel_outputs)
    optional = {"TorchTitan": titan, "Automodel": automodel, "Megatron": _megatron_sites()}
    here = {name: sites for name, sites in optional.items() if getattr(engine, f"{name}Engine", None) is not None}
    if missing := optional.keys() - here.keys():
        log.info("flathead: verl has no %s engine in this installation", ", ".join(sorted(missing)))
    return (*_function_sites(), *fsdp, *(site for sites in here.values() for site in sites))


def _check() -> str | None:
    """What the sites' signatures do not show."""
    from verl.utils.kernel.linear_cross_entropy import LinearCrossEntropy

    expected = ("hidden", "weight", "labels", "temperature", "reduction", "dist_process_group")
    got = parameters_of(LinearCrossEntropy)
    return None if got == expected else f"{_KERNEL}.LinearCrossEntropy: expected {expected}, got {got}"


_REPLACEMENT = Replacement(
    host="verl",
    distribution="verl",
    tested_versions=("0.9.1",),
    package="verl",
    sites=(),  # which depend on the installation: `_sites`
    built=(f"{_ENGINES}.base:BaseEngine",),
    check=_check,
)


def apply() -> None:
    """Puts Flathead into verl, as importing this module does.

    Errors: ModuleNotFoundError without verl; RuntimeError, with nothing replaced, if a name or signature in verl is not
    what it was, an engine has been built already, or this was applied before.
    """
    _REPLACEMENT.version()
    if not replaced():
        _REPLACEMENT.sites = _sites()
    _REPLACEMENT.apply()
    # A warning, since verl shows nothing less: whether a run uses Flathead must be seen in its log.
    log.warning("flathead: in verl %s, in the place of %d of its names", _REPLACEMENT.version(), len(replaced()))


def remove() -> None:
    """Gives verl its own functions back. Errors: RuntimeError when there is nothing to undo."""
    _REPLACEMENT.remove()


def replaced() -> list[tuple[str, str]]:
    """(verl's name, what stands there now) of everything replaced; empty after `remove`."""
    return _REPLACEMENT.table()


apply()
