"""The command line: what it accepts, and one clear line for what it does not, before any work."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

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
    "temperature beyond fp32": (
        ["rollout.temperature=1e-320"],
        "rollout.temperature: expected a positive finite number",
    ),
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
    "endless search": (["data.val_size=100000000"], "data.val_size: expected at most 100000, got 100000000"),
    "no prompts": (["data.train_batch_size=0"], "data.train_batch_size: expected at least 1, got 0"),
    "mini-batch": (["actor.ppo_mini_batch_size=3"], "expected a divisor of data.train_batch_size 8, got 3"),
    "group of one": (["rollout.n=1"], "rollout.n: expected at least 2"),
    "micro-batch": (
        ["actor.ppo_max_token_len_per_gpu=8"],
        "ppo_max_token_len_per_gpu: expected at least data.max_prompt",
    ),
    "micro-batch of the engine": (
        ["actor.fsdp_config.max_token_len_per_gpu=4"],
        "actor_rollout_ref.actor.fsdp_config.max_token_len_per_gpu: expected at least",
    ),
    "micro-batch of the reference": (
        ["ref.fsdp_config.max_token_len_per_gpu=4"],
        "actor_rollout_ref.ref.fsdp_config.max_token_len_per_gpu: expected at least",
    ),
    "chunk size alone": (
        ["actor.entropy_from_logits_chunk_size=1024"],
        "entropy_from_logits_chunk_size: has no effect while entropy_from_logits_with_chunking is false",
    ),
    "chunk size alone, the default's": (
        ["actor.entropy_from_logits_chunk_size=2048"],
        "actor.entropy_from_logits_chunk_size: has no effect with entropy_from_logits_with_chunking=false",
    ),
    "coefficient without KL": (
        ["actor.use_kl_loss=false", "actor.kl_loss_coef=0.1"],
        "actor_rollout_ref.actor.kl_loss_coef: has no effect with use_kl_loss=false",
    ),
    "in braces": (
        ["actor.use_kl_loss=false", "ref={entropy_from_logits_chunk_size: 7}"],
        "actor_rollout_ref.ref.entropy_from_logits_chunk_size: has no effect",
    ),
    "chunk size nobody takes": (
        [
            "actor.entropy_from_logits_with_chunking=true",
            "actor.entropy_from_logits_chunk_size=512",
            "actor.fsdp_config.entropy_from_logits_chunk_size=9",
            "ref.entropy_from_logits_chunk_size=9",
        ],
        "actor.entropy_from_logits_chunk_size: has no effect with the engine's own entropy_from_logits_chunk_size",
    ),
    "reference's idle chunk size": (
        [
            "actor.entropy_from_logits_with_chunking=true",
            "actor.entropy_from_logits_chunk_size=512",
            "ref.entropy_from_logits_with_chunking=false",
            "ref.entropy_from_logits_chunk_size=512",
        ],
        "ref.entropy_from_logits_chunk_size: has no effect with entropy_from_logits_with_chunking=false",
    ),
    "switch nobody takes": (
        [
            "actor.entropy_from_logits_with_chunking=true",
            "actor.fsdp_config.entropy_from_logits_with_chunking=false",
            "ref.entropy_from_logits_with_chunking=false",
        ],
        "actor.entropy_from_logits_with_chunking: has no effect with the engine's own",
    ),
    "micro-batch nobody takes": (
        [
            "actor.ppo_max_token_len_per_gpu=2048",
            "actor.fsdp_config.max_token_len_per_gpu=4096",
            "ref.fsdp_config.max_token_len_per_gpu=4096",
        ],
        "ppo_max_token_len_per_gpu: has no effect with the engine's own max_token_len_per_gpu",
    ),
    "reference without KL": (
        ["actor.use_kl_loss=false", "ref.fsdp_config.dtype=float32"],
        "actor_rollout_ref.ref.fsdp_config.dtype: has no effect with actor_rollout_ref.actor.use_kl_loss=false",
    ),
    "three clips": (
        ["actor.clip_ratio=0.1", "actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.3"],
        "clip_ratio: has no effect with clip_ratio_low and clip_ratio_high set",
    ),
    "steps of a constant rate": (
        ["actor.optim.total_training_steps=5", "actor.optim.lr_scheduler_type=constant"],
        "total_training_steps: has no effect with lr_scheduler_type=constant",
    ),
    "evaluation after the end": (["trainer.test_freq=13"], "trainer.test_freq: has no effect past trainer.steps 12"),
    "prompt": (["data.max_prompt_length=5"], "data.max_prompt_length: expected at least"),
    "chunk -1": (
        ["actor.entropy_from_logits_with_chunking=true", "actor.entropy_from_logits_chunk_size=-1"],
        "entropy_from_logits_chunk_size: expected at least 1, got -1",
    ),
    "chunk 2k": (
        ["actor.entropy_from_logits_chunk_size=2k"],
        "actor.entropy_from_logits_chunk_size: expected integer, got '2k'",
    ),
    "chunk null": (["actor.entropy_from_logits_chunk_size=null"], "actor.entropy_from_logits_chunk_size: "),
    "engine without its package": (
        ["--config-name", "ppo_veomni_trainer"],
        'veomni is not installed; pip install "flathead[veomni]"',
    ),
    "veomni's tensor parallel": (
        ["--config-name", "ppo_veomni_trainer", "actor.veomni.tensor_parallel_size=2"],
        "veomni.tensor_parallel_size: expected 1, got 2; of the engines here fsdp, megatron, torchtitan or automodel",
    ),
    "automodel's context parallel": (
        ["--config-name", "ppo_automodel_trainer", "actor.automodel_config.cp_size=2"],
        "automodel_config.cp_size: expected 1, got 2; of the engines here megatron or torchtitan can have more",
    ),
    "torchtitan's pipeline": (
        ["--config-name", "ppo_torchtitan_trainer", "actor.torchtitan.pipeline_parallel_size=2"],
        "torchtitan.pipeline_parallel_size: expected 1, got 2; of the engines here megatron can have more",
    ),
    "torchtitan's attention": (
        ["--config-name", "ppo_torchtitan_trainer", "actor.torchtitan.attn_type=sdpa"],
        "actor_rollout_ref.actor.torchtitan.attn_type: expected one of flex, flex_flash, varlen, got 'sdpa'",
    ),
    "torchtitan's attention, under context parallel": (
        [
            "--config-name",
            "ppo_torchtitan_trainer",
            "actor.torchtitan.attn_type=varlen",
            "actor.torchtitan.context_parallel_size=2",
        ],
        "torchtitan.attn_type: expected flex with context_parallel_size 2, got varlen",
    ),
    "torchtitan's backend": (
        ["--config-name", "ppo_torchtitan_trainer", "actor.torchtitan.spmd_backend=full_dtensor"],
        "torchtitan.spmd_backend: expected one of partial_dtensor, spmd_types, got 'full_dtensor'",
    ),
    "megatron's layout": (
        ["--config-name", "ppo_megatron_trainer", "actor.megatron.tensor_model_parallel_size=2"],
        "tensor_model_parallel_size 2 x pipeline_model_parallel_size 1 x context_parallel_size 1 = 2 does not divide",
    ),
    "megatron's other key": (["actor.megatron.dtype=float32"], "actor_rollout_ref.actor.megatron.dtype: no such key"),
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
    "clip": (["actor.clip_ratio=2"], "actor.clip_ratio: expected at most 1"),
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
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size 2 does not divide the 1 processes",
    ),
    "no processes": (
        ["actor.fsdp_config.tensor_parallel_size=0"],
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size 0 does not",
    ),
    "fsdp_size": (["actor.fsdp_config.fsdp_size=-7"], "actor_rollout_ref.actor.fsdp_config.fsdp_size -7 does not"),
    "no key": (["=b"], "argument: expected KEY=VALUE, got '=b'"),
    "open quote": (["trainer.run_dir='a"], "trainer.run_dir"),
    "no name": (["--config-name"], "--config-name: expected a NAME after it"),
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
    assert "steps: 7" in shown and "entropy_from_logits_chunk_size: 2048" in shown and "${" not in shown
    assert main(["report", "--help"]) == 0
    assert "flathead report RUN_DIR" in capsys.readouterr().out


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
        ("++actor.optim.lr=1", "++actor_rollout_ref.actor.optim.lr=1"),
        ("ref={strategy: fsdp}", "actor_rollout_ref.ref={strategy: fsdp}"),
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


@pytest.mark.parametrize(
    ("missing", "extra"), [("mbridge", "megatron"), ("megatron", "megatron"), ("reasoning_gym", "train")]
)
def test_a_missing_package_is_one_line_that_names_the_extra(
    missing: str, extra: str, model: Path, tmp_path: Path
) -> None:
    words = ["train", "--config-name", "ppo_megatron_trainer", f"model.path={model}", f"trainer.run_dir={tmp_path}"]
    program = f"import sys; sys.modules[{missing!r}] = None; from flathead.cli import main; sys.exit(main({words}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == f'flathead: {missing} is not installed; pip install "flathead[{extra}]"\n'


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere/run"])
def test_an_unusable_run_directory_is_one_line(
    place: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("here already")
    assert main(["train", f"model.path={model}", f"trainer.run_dir={tmp_path / place}"]) == 2
    error = capsys.readouterr().err
    assert "trainer.run_dir: expected a directory that can be made and written to" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "damage",
    [
        "config.json {",
        "no heads",
        "tokenizer gone",
        "tokenizer {}",
        "weights cut",
        "a weight gone",
        "weights gone",
        "gguf",
    ],
    ids=lambda d: d.replace(" ", "-"),
)
def test_a_damaged_model_is_one_line(
    damage: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    if damage == "config.json {":
        (broken / "config.json").write_text("{")
    elif damage == "no heads":
        text = (broken / "config.json").read_text()
        (broken / "config.json").write_text(text.replace('"num_attention_heads": 4', '"num_attention_heads": 0'))
    elif damage == "tokenizer {}":
        (broken / "tokenizer.json").write_text("{}")
    elif damage == "a weight gone":
        weights = load_file(broken / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, broken / "model.safetensors", {"format": "pt"})
    elif damage == "tokenizer gone":
        for path in broken.glob("*token*"):
            path.unlink()
    elif damage == "weights cut":
        whole = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif damage == "weights gone":
        (broken / "model.safetensors").unlink()
    else:
        broken = broken / "x.gguf"
        broken.write_bytes(b"GGUF, they said")
    assert main(["train", f"model.path={broken}", f"trainer.run_dir={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # transformers may have warned before
    assert error.startswith("flathead: actor_rollout_ref.model.path: ") and str(tmp_path) in error
    assert "cannot be loaded" in error or damage == "a weight gone"
    assert damage != "a weight gone" or "has no weights for model.layers.1.mlp.up_proj.weight" in error
