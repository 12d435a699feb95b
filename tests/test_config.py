"""The configuration tree: declared once, interpolated where it should be, and every value of it arrives."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from flathead import config as schema
from flathead.batch import PackedBatch
from flathead.cli import expand_alias
from flathead.engines import base as engine_base
from flathead.settings import GENERATED, compose, generated, generated_path, resolve, to_yaml

CONF = Path(schema.__file__).parent / "conf"
CHUNKING = ("entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size")


def configure(*overrides: str, name: str = "ppo_trainer") -> schema.TrainConfig:
    given = [expand_alias(override) for override in overrides]
    return resolve(compose(name, given), given)


def engine_overrides(strategy: str) -> list[str]:
    group = schema.STRATEGIES[strategy].group
    return [f"actor@actor_rollout_ref.actor={group}_actor", f"ref@actor_rollout_ref.ref={group}_ref"]


def engine_configs(config: schema.TrainConfig) -> tuple[schema.EngineConfig, schema.EngineConfig]:
    return schema.engine_of(config.actor_rollout_ref.actor), schema.engine_of(config.actor_rollout_ref.ref)


def test_the_default_job() -> None:
    config = configure()
    assert config.actor_rollout_ref.actor.optim.lr == 2e-5
    assert (config.data.task, config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == ("chain_sum", 8, 8)
    assert schema.task_settings(config.data)[0] == {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_another_task_has_its_own_parameters() -> None:
    assert schema.task_settings(configure("data.task=gcd").data) == ({}, "Reply with the answer only.")
    config = configure("data.task_config={max_terms: 4}", "data.instruction=Go.")
    assert schema.task_settings(config.data) == ({"max_terms": 4}, "Go.")


@pytest.mark.parametrize("strategy", schema.STRATEGIES)
def test_engine_and_reference_take_the_actors_switches(strategy: str) -> None:
    engine, key = engine_overrides(strategy), schema.STRATEGIES[strategy].key
    assert [getattr(one, name) for one in engine_configs(configure(*engine)) for name in CHUNKING] == [False, 2048] * 2
    on = ("actor.entropy_from_logits_with_chunking=true", "actor.entropy_from_logits_chunk_size=7")
    for one in engine_configs(configure(*engine, *on)):
        assert [getattr(one, name) for name in CHUNKING] == [True, 7]
    for one in engine_configs(configure(*engine, "actor.entropy_from_logits_with_chunking=true")):
        assert [getattr(one, name) for name in CHUNKING] == [True, 2048]  # the switch alone: the default's rows
    config = configure(*engine, "actor.ppo_max_token_len_per_gpu=4096", f"actor.{key}.dtype=float32")
    for one in engine_configs(config):
        assert (one.max_token_len_per_gpu, one.dtype) == (4096, "float32")
    actor, ref = engine_configs(configure(*engine, f"actor.{key}.entropy_from_logits_with_chunking=true"))
    assert (actor.entropy_from_logits_with_chunking, ref.entropy_from_logits_with_chunking) == (True, False)
    actor, ref = engine_configs(configure(*engine, "ref.entropy_from_logits_with_chunking=true"))
    assert (actor.entropy_from_logits_with_chunking, ref.entropy_from_logits_with_chunking) == (False, True)


@pytest.mark.parametrize("lm_head", ["fused", "logits"])
@pytest.mark.parametrize("strategy", schema.STRATEGIES)
def test_a_chunk_size_on_the_command_line_reaches_the_call(strategy: str, lm_head: str) -> None:
    """Every engine's statistics are those of a MicroStep with its configuration, as the engine contract shows."""
    key = schema.STRATEGIES[strategy].key
    on = ("actor.entropy_from_logits_with_chunking=true", "actor.entropy_from_logits_chunk_size=7")
    off = f"actor.{key}.lm_head={lm_head}"
    batch = PackedBatch.from_sequences([[1, 2], [3]], [[4, 5], [6]])
    for overrides, expected in (((*on, off), 7), ((off,), None if lm_head == "fused" else 6)):
        for engine in engine_configs(configure(*engine_overrides(strategy), *overrides)):
            step = engine_base.MicroStep(batch, ("log_prob",), 1.0, engine)
            name = "linear_token_stats" if engine.lm_head == "fused" else "token_stats"
            with patch.object(engine_base, name, wraps=getattr(engine_base, name)) as call:
                step.from_hidden(torch.zeros(6, 4), torch.zeros(9, 4)) if engine.lm_head == "fused" else None
                step.from_logits(torch.zeros(6, 9)) if engine.lm_head == "logits" else None
            assert engine.lm_head == lm_head and [c.kwargs["chunk_size"] for c in call.call_args_list] == [expected]


def test_verl_overrides_of_a_megatron_run() -> None:
    config = configure(
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.entropy_from_logits_with_chunking=True",
        "actor_rollout_ref.actor.entropy_from_logits_chunk_size=1024",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.sequence_parallel=True",
        "actor_rollout_ref.actor.megatron.use_distributed_optimizer=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
        "actor_rollout_ref.rollout.n=5",
        "algorithm.adv_estimator=grpo",
        name="ppo_megatron_trainer",
    )
    for engine in engine_configs(config):
        assert isinstance(engine, schema.McoreEngineConfig)
        assert [getattr(engine, name) for name in CHUNKING] == [True, 1024]
        assert (engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size) == (2, 2)


@pytest.mark.parametrize("name", GENERATED)
def test_the_flattened_references_are_up_to_date(name: str) -> None:
    assert generated_path(name).read_text() == generated(name), "run: python -m flathead.settings"


def test_the_flattened_reference_is_the_same_configuration() -> None:
    for name in GENERATED:
        flat = OmegaConf.merge(compose(name, []), OmegaConf.load(generated_path(name)))
        assert resolve(flat) == configure(name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", schema.STRATEGIES)
def test_the_strategy_alone_chooses_the_engine(strategy: str) -> None:
    key = schema.STRATEGIES[strategy].key
    switches = ("actor.use_kl_loss=true", f"actor.{key}.lm_head=logits")
    given = (f"actor.strategy={strategy}", *switches)
    assert configure(*given) == configure(*switches, name=schema.CONFIG_NAMES[strategy])
    with pytest.raises(ValueError, match=rf"actor\.{key}\.lm_head: expected one of fused, logits, got 'foo'"):
        configure(*given[:-1], f"actor.{key}.lm_head=foo")


def test_another_engine_has_other_keys() -> None:
    with pytest.raises(ValueError, match=r"actor\.strategy: expected fsdp.* --config-name ppo_megatron_trainer"):
        configure("actor.strategy=megatron", "actor@actor_rollout_ref.actor=dp_actor")
    with pytest.raises(ValueError, match=r"actor\.strategy: expected megatron.*actor=dp_actor"):
        configure("actor.strategy=fsdp", name="ppo_megatron_trainer")
    with pytest.raises(ValueError, match=r"ref\.strategy: expected fsdp.*ref=megatron_ref"):
        configure(engine_overrides("megatron")[0])
    with pytest.raises(ValueError, match=r"actor\.megatron\.tensor_model_parallel_size: no such key"):
        configure("actor.megatron.tensor_model_parallel_size=2")
    with pytest.raises(ValueError, match=r"actor\.fsdp_config\.dtype: no such key"):
        configure("actor.fsdp_config.dtype=float32", name="ppo_megatron_trainer")


def test_unless_set_themselves() -> None:
    on = "actor.entropy_from_logits_with_chunking=true"
    actor, ref = engine_configs(
        configure(on, "actor.entropy_from_logits_chunk_size=7", "ref.fsdp_config.entropy_from_logits_chunk_size=9")
    )
    assert (actor.entropy_from_logits_chunk_size, ref.entropy_from_logits_chunk_size) == (7, 9)
    actor, ref = engine_configs(configure(on, "ref.fsdp_config.entropy_from_logits_with_chunking=false"))
    assert (actor.entropy_from_logits_with_chunking, ref.entropy_from_logits_with_chunking) == (True, False)
    with pytest.raises(ValueError, match=r"ref\.fsdp_config\.entropy_from_logits_chunk_size: has no effect"):
        configure("ref.fsdp_config.entropy_from_logits_chunk_size=9")


def arr_classes() -> set[type]:
    found = classes()
    for strategy in schema.STRATEGIES.values():
        found |= classes(strategy.actor) | classes(strategy.ref)
    return found


def classes(kind: type = schema.TrainConfig) -> set[type]:
    """Every dataclass of the tree, with what it inherits from."""
    below = [type(getattr(kind(), field.name)) for field in fields(kind)]
    own = {base for base in kind.__mro__ if is_dataclass(base)}
    return own.union(*(classes(value) for value in below if is_dataclass(value)))


def test_no_key_is_declared_twice() -> None:
    assert {schema.EntropyChunkingConfig, schema.EngineConfig, schema.FSDPEngineConfig} <= arr_classes()
    for kind in arr_classes():
        for base in kind.__mro__[1:]:
            again = vars(kind).get("__annotations__", {}).keys() & vars(base).get("__annotations__", {}).keys()
            assert not again, f"{kind.__name__} declares {again} again, which it has from {base.__name__}"
    assert [kind for kind in arr_classes() if CHUNKING[0] in vars(kind).get("__annotations__", {})] == [
        schema.EntropyChunkingConfig
    ]
    for name in ("Mcore", "FSDP", "VeOmni", "Torchtitan", "Automodel"):
        engine, actor = getattr(schema, f"{name}EngineConfig"), getattr(schema, f"{name.title()}ActorConfig", None)
        for kind in (engine, actor or schema.ActorConfig):
            assert (kind().entropy_from_logits_with_chunking, kind().entropy_from_logits_chunk_size) == (False, 2048)


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
    again = OmegaConf.merge(compose("ppo_trainer", []), OmegaConf.create(to_yaml(config)))
    assert OmegaConf.to_object(again) == config


def test_what_the_reference_inherits_is_no_mistake() -> None:
    budget = "actor.fsdp_config.stats_memory_budget=8000000"
    for other in ("ref.entropy_from_logits_with_chunking=true", "ref.fsdp_config.lm_head=logits"):
        actor, ref = engine_configs(configure(budget, other))
        assert (actor.stats_memory_budget, ref.stats_memory_budget) == (8000000, None)
        with pytest.raises(ValueError, match=r"ref\.fsdp_config\.stats_memory_budget: expected null"):
            configure(budget, other, "ref.fsdp_config.stats_memory_budget=8000000")
    longer = ("actor.fsdp_config.max_token_len_per_gpu=4096", "ref.fsdp_config.max_token_len_per_gpu=4096")
    assert configure(*longer, "data.max_response_length=2000").data.max_response_length == 2000


def test_hydras_and_verls_spellings() -> None:
    config = configure("++trainer.steps=3", "++actor.optim.lr=0.5", "rollout.top_k=-1")
    assert (config.trainer.steps, config.actor_rollout_ref.actor.optim.lr) == (3, 0.5)
    assert config.actor_rollout_ref.rollout.top_k == -1
