"""The command line: what it accepts, and one clear line for what it does not, before any work."""

from pathlib import Path

import pytest

from flathead.cli import ALIASES, expand_alias, main
from tests.support.jobs import tiny_chat_model

# overrides -> what the line must say: the key, and what was expected or what to do
MISTAKES = {
    "unknown key": (["trainer.stepz=3"], "trainer.stepz: no such key; did you mean trainer.steps?"),
    "unknown key, short form": (
        ["actor.optim.learning_rate=1"],
        "actor_rollout_ref.actor.optim.learning_rate: no such",
    ),
    "unknown key, added": (["+foo=1"], "+foo: no such key"),
    "key below a value": (["trainer.steps.x=1"], "trainer.steps has no keys of its own"),
    "wrong type": (["trainer.steps=many"], "trainer.steps: expected integer, got 'many'"),
    "fraction": (["rollout.n=1.5"], "actor_rollout_ref.rollout.n: expected integer, got '1.5'"),
    "no bool": (["actor.use_kl_loss=perhaps"], "actor_rollout_ref.actor.use_kl_loss: Value 'perhaps'"),
    "temperature 0": (["rollout.temperature=0"], "rollout.temperature: expected a positive finite number, got 0.0"),
    "temperature nan": (["rollout.temperature=nan"], "rollout.temperature: expected a positive finite number, got nan"),
    "top_p": (["rollout.top_p=0"], "rollout.top_p: expected a number in (0, 1], got 0.0"),
    "no model": (["model.path=/no/such/model"], "model.path: expected a local directory in Hugging Face format"),
    "a directory, no model": (["model.path=."], "(a directory without config.json)"),
    "unknown task": (["data.task=chain_summ"], "data.task: expected a reasoning-gym task"),
    "near task": (["data.task=chain_summ"], "did you mean chain_sum"),
    "task parameter": (
        ["data.task_config={max_term: 3}"],
        "data.task_config.max_term: expected a parameter of chain_sum",
    ),
    "task parameter value": (["data.task_config={min_terms: 5, max_terms: 2}"], "max_terms must be >= min_terms"),
    "task_config no table": (["data.task_config=3"], "data.task_config: expected {name: value, ...} or null, got 3"),
    "empty data set": (["data.val_size=0"], "data.val_size: expected at least 1, got 0"),
    "no question left": (["data.val_size=199", "data.train_batch_size=400"], "data.val_size"),
    "too few questions": (["data.val_size=500"], "data.val_size: expected at most about 200"),
    "no prompts": (["data.train_batch_size=0"], "data.train_batch_size: expected at least 1, got 0"),
    "mini-batch": (["actor.ppo_mini_batch_size=3"], "expected a divisor of data.train_batch_size 8, got 3"),
    "group of one": (["rollout.n=1"], "rollout.n: expected at least 2"),
    "micro-batch": (
        ["actor.ppo_max_token_len_per_gpu=8"],
        "ppo_max_token_len_per_gpu: expected at least data.max_prompt",
    ),
    "prompt": (["data.max_prompt_length=5"], "data.max_prompt_length: expected at least"),
    "chunk": (["actor.entropy_from_logits_chunk_size=0"], "entropy_from_logits_chunk_size: expected at least 1, got 0"),
    "budget, logits": (
        ["actor.fsdp_config.stats_memory_budget=1000", "actor.fsdp_config.lm_head=logits"],
        "stats_memory_budget: expected null with lm_head=logits",
    ),
    "budget, chunks": (
        ["actor.fsdp_config.stats_memory_budget=1000", "actor.entropy_from_logits_with_chunking=true"],
        "stats_memory_budget: expected null while entropy_from_logits_with_chunking",
    ),
    "lm_head": (["actor.fsdp_config.lm_head=flat"], "lm_head: expected one of fused, logits, got 'flat'"),
    "clip": (["actor.clip_ratio=2"], "clip_ratio_low: expected at most 1"),
    "dual clip": (["actor.clip_ratio_c=1"], "clip_ratio_c: expected more than 1, or null for no dual clip, got 1.0"),
    "dual clip, cispo": (
        ["actor.clip_ratio_c=3", "actor.policy_loss.loss_mode=cispo"],
        "clip_ratio_c: expected null with loss_mode=cispo",
    ),
    "betas": (["actor.optim.betas=[0.9]"], "optim.betas: expected two numbers in [0, 1), got [0.9]"),
    "lr": (["actor.optim.lr=-1"], "optim.lr: expected a positive finite number, got -1.0"),
    "no steps": (["trainer.total_training_steps=0"], "trainer.steps: expected at least 1, got 0"),
    "processes": (
        ["actor.fsdp_config.tensor_parallel_size=2"],
        "tensor_parallel_size 2 does not divide the 1 processes",
    ),
    "offload": (["actor.fsdp_config.param_offload=true"], "param_offload: has no effect in one process"),
    "reference layout": (["ref.fsdp_config.tensor_parallel_size=2"], "tensor_parallel_size"),
    "no such configuration": (["--config-name", "nope"], "Cannot find primary config 'nope'"),
    "no override": (["faster"], "argument: expected KEY=VALUE or --config-name NAME, got 'faster'"),
    "no option": (["--fast"], "argument: expected KEY=VALUE or --config-name NAME, got '--fast'"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_any_work(
    mistake: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, expected = MISTAKES[mistake]
    assert main(["train", f"model.path={model}", f"trainer.run_dir={tmp_path / 'run'}", *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("flathead: ") and expected in captured.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "command: expected"),
        (["report"], "report: expected one RUN_DIR, got nothing"),
        (["report", "/no/such/run"], "RUN_DIR: expected a run directory with a step in metrics.jsonl"),
    ],
)
def test_other_commands(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


def test_help_shows_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    assert "flathead train" in capsys.readouterr().out
    assert main(["train", "--help", "trainer.steps=7"]) == 0
    shown = capsys.readouterr().out
    assert "steps: 7" in shown and "entropy_from_logits_chunk_size: 2048" in shown


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("model.path=a=b", "actor_rollout_ref.model.path=a=b"),
        ("rollout.n=4", "actor_rollout_ref.rollout.n=4"),
        ("ref.fsdp_config.lm_head=logits", "actor_rollout_ref.ref.fsdp_config.lm_head=logits"),
        ("trainer.total_training_steps=3", "trainer.steps=3"),
        ("trainer.steps=3", "trainer.steps=3"),
        ("trainer.total_training_steps_=3", "trainer.total_training_steps_=3"),
        ("modelling.path=x", "modelling.path=x"),
        ("actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr=1"),
    ],
)
def test_short_forms(written: str, meant: str) -> None:
    assert expand_alias(written) == meant


def test_short_forms_lead_to_keys() -> None:
    from omegaconf import OmegaConf

    from flathead.config import TrainConfig

    declared = OmegaConf.structured(TrainConfig)
    for meant in ALIASES.values():
        assert OmegaConf.select(declared, meant.rstrip("."), throw_on_missing=False) is not None
