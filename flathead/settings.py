"""From the YAML tree and the command line's overrides to a checked TrainConfig (Hydra and OmegaConf do the work)."""

from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flathead import config as schema

ConfigStore.instance().store(name="schema", node=schema.TrainConfig)


def _one_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = getattr(cause, "full_key", None)
    reason = next((line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))), "")
    return f"{key}: {reason}" if key else "; ".join(lines[:2])


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """The whole configuration, interpolations unresolved.

    Errors: ValueError naming an unknown key, a value of the wrong type, or an unknown configuration name.
    """
    with initialize_config_module("flathead.conf", version_base="1.3"):
        try:
            return hydra_compose(config_name, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(f"{_one_line(error)}; `flathead train --help` prints every key") from error


def resolve(composed: DictConfig) -> schema.TrainConfig:
    """Interpolations resolved, types and values checked. Errors: ValueError."""
    try:
        config = cast(schema.TrainConfig, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        raise ValueError(_one_line(error)) from error
    schema.check(config)
    return config


def to_yaml(config: schema.TrainConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))
