"""From the YAML tree and the command line's overrides to a checked TrainConfig (Hydra and OmegaConf do the work)."""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flathead import config as schema
from flathead.config_checks import check

_STORE = ConfigStore.instance()
_STORE.store(name="schema", node=schema.TrainConfig)
for _name, _strategy in schema.STRATEGIES.items():
    _STORE.store(group="actor", name=f"{_name}_schema", node=_strategy.actor)
    _STORE.store(group="ref", name=f"{_name}_schema", node=_strategy.ref)

_GROUPS = "actor@", "ref@"  # overrides that choose the engine, and with it the keys there are

_WRONG_TYPE = re.compile(r"Value (.*) of type '.*' could not be converted to (\w+)", re.DOTALL)
_HELP = "`flathead train --help` prints every key"


def _one_line(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = getattr(cause, "full_key", None)
    reason = next((line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))), "")
    if wrong_type := _WRONG_TYPE.match(reason):
        reason = f"expected {wrong_type[2].lower()}, got {wrong_type[1]}"
    return f"{key}: {reason}" if key else lines[0]


def _check_keys(declared: DictConfig, overrides: list[str]) -> None:
    """Errors: ValueError for an override's key that is not declared. Hydra's groups (with @ or /) are left to it."""
    for override in overrides:
        key = override.partition("=")[0]
        if not key.strip():
            raise ValueError(f"argument: expected KEY=VALUE, got {override!r}; {_HELP}")
        if "@" in key or "/" in key:
            continue
        if key.startswith("++"):  # Hydra's "set, or add": there is nothing to add
            key = key.removeprefix("++")
        node, known = declared, ""
        for part in key.split("."):
            names = list(node) if isinstance(node, DictConfig) else []
            if part not in names:
                near = get_close_matches(part, names, n=1)
                hint = (
                    f"did you mean {known}{near[0]}? "
                    if near
                    else f"{known[:-1] or 'the top level'} has "
                    + (f"{', '.join(names)}; " if names else "no keys of its own; ")
                )
                raise ValueError(f"{key}: no such key; {hint}{_HELP}")
            node, known = OmegaConf.select(node, part), f"{known}{part}."


def _groups(overrides: list[str]) -> list[str]:
    return [override for override in overrides if override.lstrip("+~").startswith(_GROUPS)]


def _of_strategy(config_name: str, overrides: list[str]) -> list[str]:
    """The overrides, and before them the engine's groups where `actor_rollout_ref.actor.strategy` alone names it.

    Beside another engine's configuration or groups given by hand the two would contradict each other: check says so."""
    key = "actor_rollout_ref.actor.strategy="
    named = [override.removeprefix(key) for override in overrides if override.startswith(key)]
    strategy = schema.STRATEGIES.get(named[-1]) if named else None
    if strategy is None or _groups(overrides) or config_name != schema.CONFIG_NAMES["fsdp"]:
        return overrides
    chosen = (f"{part}@actor_rollout_ref.{part}={strategy.group}_{part}" for part in ("actor", "ref"))
    return [*chosen, *overrides]


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """The whole configuration, interpolations unresolved.

    Errors: ValueError naming an unknown key, a value of the wrong type, or an unknown configuration name.
    """
    overrides = _of_strategy(config_name, overrides)
    with initialize_config_module("flathead.conf", version_base="1.3"):
        try:
            _check_keys(hydra_compose(config_name, _groups(overrides)), overrides)
            return hydra_compose(config_name, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(f"{_one_line(error)}; {_HELP}") from error


def resolve(composed: DictConfig, overrides: Iterable[str] = ()) -> schema.TrainConfig:
    """Interpolations resolved, types and values checked; `overrides`: what was set by hand, and must take effect.

    Errors: ValueError."""
    try:
        config = cast(schema.TrainConfig, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        raise ValueError(_one_line(error)) from error
    check(config, _keys_given(overrides))
    return config


def _keys_given(overrides: Iterable[str]) -> set[str]:
    """The keys that overrides set, those inside of {key: value} included."""

    def below(key: str, value: object) -> Iterator[str]:
        yield key
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from below(f"{key}.{name}", inner)

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return {key for override in parsed for key in below(override.key_or_group, override.value())}


GENERATED = tuple(schema.CONFIG_NAMES.values())


def generated(config_name: str) -> str:
    """The flattened reference of a configuration: every key, interpolations as written."""
    head = f"# {config_name}.yaml with all its parts, for reading. Made by: python -m flathead.settings\n"
    return head + OmegaConf.to_yaml(compose(config_name, []))


def generated_path(config_name: str) -> Path:
    return Path(__file__).parent / "conf" / f"_generated_{config_name}.yaml"


def to_yaml(config: schema.TrainConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


if __name__ == "__main__":
    for _name in GENERATED:
        generated_path(_name).write_text(generated(_name))
