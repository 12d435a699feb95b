"""The configuration tree: declared once, interpolated where it should be, and every value of it arrives."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from flathead import config as schema
from flathead.cli import expand_alias
from flathead.settings import compose, resolve, to_yaml

CONF = Path(schema.__file__).parent / "conf"
CHUNKING = ("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size")


def configure(*overrides: str) -> schema.TrainConfig:
    return resolve(compose("ppo_trainer", [expand_alias(override) for override in overrides]))


def test_the_default_job() -> None:
    config = configure()
    assert config.actor_rollout_ref.actor.optim.lr == 2e-5
    assert (config.data.task, config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == ("chain_sum", 8, 8)
    assert schema.task_settings(config.data)[0] == {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_another_task_has_its_own_parameters() -> None:
    assert schema.task_settings(configure("data.task=gcd").data) == ({}, "Reply with the answer only.")
    config = configure("data.task_config={max_terms: 4}", "data.instruction=Go.")
    assert schema.task_settings(config.data) == ({"max_terms": 4}, "Go.")


def test_engine_and_reference_take_the_actors_switches() -> None:
    arr = configure(
        "actor.entropy_from_logits_with_chunking=true", "actor.entropy_from_logits_chunk_size=7"
    ).actor_rollout_ref
    for engine in (arr.actor.fsdp_config, arr.ref.fsdp_config):
        assert [getattr(engine, name) for name in CHUNKING] == [True, 7]
    arr = configure("actor.ppo_max_token_len_per_gpu=4096", "actor.fsdp_config.dtype=float32").actor_rollout_ref
    assert arr.actor.fsdp_config.max_token_len_per_gpu == arr.ref.fsdp_config.max_token_len_per_gpu == 4096
    assert arr.ref.fsdp_config.dtype == "float32"


def test_unless_set_themselves() -> None:
    on = "actor.entropy_from_logits_with_chunking=true"
    arr = configure(
        on, "actor.entropy_from_logits_chunk_size=7", "ref.fsdp_config.entropy_from_logits_chunk_size=9"
    ).actor_rollout_ref
    assert arr.actor.fsdp_config.entropy_from_logits_chunk_size == 7
    assert arr.ref.fsdp_config.entropy_from_logits_chunk_size == 9
    arr = configure(on, "ref.fsdp_config.entropy_from_logits_with_chunking=false").actor_rollout_ref
    assert arr.actor.fsdp_config.entropy_from_logits_with_chunking is True
    assert arr.ref.fsdp_config.entropy_from_logits_with_chunking is False
    with pytest.raises(ValueError, match=r"ref\.fsdp_config\.entropy_from_logits_chunk_size: has no effect"):
        configure("ref.fsdp_config.entropy_from_logits_chunk_size=9")


def classes(kind: type = schema.TrainConfig) -> set[type]:
    """Every dataclass of the tree, with what it inherits from."""
    below = [type(getattr(kind(), field.name)) for field in fields(kind)]
    own = {base for base in kind.__mro__ if is_dataclass(base)}
    return own.union(*(classes(value) for value in below if is_dataclass(value)))


def test_no_key_is_declared_twice() -> None:
    assert {schema.EntropyChunkingConfig, schema.EngineConfig, schema.FSDPEngineConfig} <= classes()
    for kind in classes():
        for base in kind.__mro__[1:]:
            again = vars(kind).get("__annotations__", {}).keys() & vars(base).get("__annotations__", {}).keys()
            assert not again, f"{kind.__name__} declares {again} again, which it has from {base.__name__}"
    assert [kind for kind in classes() if CHUNKING[0] in vars(kind)["__annotations__"]] == [
        schema.EntropyChunkingConfig
    ]


class Strict(yaml.SafeLoader):
    """YAML itself lets the last of two equal keys win, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key twice: {keys}"
        return super().construct_mapping(node, deep)


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.relative_to(CONF).as_posix())
def test_no_yaml_file_has_a_key_twice(path: Path) -> None:
    assert yaml.load(path.read_text(), Strict)


def test_saved_configuration_is_the_same_configuration() -> None:
    config = configure("trainer.steps=3", "data.task_config={max_terms: 3}", "actor.optim.betas=[0.8,0.9]")
    again = OmegaConf.merge(OmegaConf.structured(schema.TrainConfig), OmegaConf.create(to_yaml(config)))
    assert OmegaConf.to_object(again) == config
