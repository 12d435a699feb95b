"""verl's own SFT trainer as a job of seconds on the CPU, in one process or as Ray runs it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import ROOT, torchrun
from tests.support.verl_engine import environment

_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% else %} {% endif %}{% endfor %}"
)


def write_subtractions(path: Path) -> None:
    import pandas

    rows = [
        [{"role": "user", "content": f"{a} - {b}"}, {"role": "assistant", "content": f"{a - b}"}]
        for a in range(8)
        for b in range(4)
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(path)


def give_chat_template(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(model)


def losses(model: Path, data: Path, *, ray: bool, flathead: bool, calls: Path) -> list[float]:
    """The loss of each step. calls: where every call of token_stats leaves a line."""
    overrides = [
        f"data.train_files={data}",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=8",
        "data.use_dynamic_bsz=False",
        "data.max_length=64",
        "data.num_workers=0",
        f"model.path={model}",
        "model.enable_gradient_checkpointing=False",
        "+model.override_config.attn_implementation=eager",
        "engine.strategy=fsdp2",
        "engine.model_dtype=fp32",
        *(f"+engine.mixed_precision.{name}_dtype=fp32" for name in ("param", "reduce", "buffer")),
        "optim.lr=1e-2",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.logger=[console]",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={calls.parent / 'checkpoints'}",
    ]
    launcher = [sys.executable, "-m", "verl.trainer.sft_trainer_ray"] if ray else [
        *torchrun(1), "-m", "verl.trainer.sft_trainer"
    ]  # fmt: skip
    settings = environment(flathead=flathead)
    if flathead:
        settings["VERL_USE_EXTERNAL_MODULES"] += ",tests.support.verl_witness"
    run = subprocess.run(
        [*launcher, *overrides],
        env={**os.environ, **settings, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FLATHEAD_CALLS": str(calls)},
        cwd=calls.parent,
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if "train/loss:" in line]
    return [float(line.partition("train/loss:")[2].split(" ")[0]) for line in lines]
