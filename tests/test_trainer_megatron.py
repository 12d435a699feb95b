"""`flathead train --config-name ppo_megatron_trainer`: the same run as on the other engine, and exact continuation.

In processes of their own: Megatron's groups are global.
"""

from pathlib import Path

import pytest
import torch

from flathead.cli import main
from tests.support.jobs import command, curve, start, tiny_chat_model, torchrun

EXACT = ("rollout.dtype=float32", "trainer.save_freq=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fsdp(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("fsdp") / "run"
    assert main(command(model, run_dir, *EXACT, "trainer.steps=3", "actor.fsdp_config.dtype=float32")) == 0
    return run_dir


def megatron(model: Path, run_dir: Path, *overrides: str, processes: int = 1, expected: int = 0) -> str:
    words = command(model, run_dir, *EXACT, *overrides)
    process = start([*words, "--config-name", "ppo_megatron_trainer"], torchrun(processes) if processes > 1 else ())
    output, _ = process.communicate(timeout=300)
    assert process.returncode == expected, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (1, ()),
        (2, ("actor.megatron.tensor_model_parallel_size=2",)),
        (2, ("actor.megatron.pipeline_model_parallel_size=2", "actor.megatron.lm_head=logits")),
    ],
    ids=["one process", "tensor parallel", "pipeline parallel, logits"],
)
def test_the_same_run_as_with_fsdp(
    model: Path, fsdp: Path, tmp_path: Path, processes: int, layout: tuple[str, ...]
) -> None:
    fp32 = ("actor.megatron.dtype=float32", "trainer.steps=3")
    output = megatron(model, tmp_path / "run", *fp32, *layout, processes=processes)
    for ours, theirs in zip(curve(tmp_path / "run"), curve(fsdp), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-5)
    assert "Warning" not in output and output.count("held-out accuracy: before") == 1
    from transformers import AutoModelForCausalLM

    trained, other = (AutoModelForCausalLM.from_pretrained(path / "final") for path in (tmp_path / "run", fsdp))
    for mine, its in zip(trained.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=2e-3)  # steps of 5e-3


@pytest.mark.slow
def test_goes_on_exactly_and_only_in_its_own_layout(model: Path, tmp_path: Path) -> None:
    """In bf16: masters, moments and schedule are all in the checkpoint, sharded over two ranks."""
    two = ("actor.megatron.tensor_model_parallel_size=2",)
    megatron(model, tmp_path / "whole", "trainer.steps=4", *two, processes=2)
    megatron(model, tmp_path / "parts", "trainer.steps=2", *two, processes=2)
    output = megatron(model, tmp_path / "parts", "trainer.steps=4", processes=1, expected=2)
    assert "expected a run in the layout it was written by (megatron: 2 processes, tensor 2" in output.splitlines()[-1]
    megatron(model, tmp_path / "parts", "trainer.steps=4", *two, processes=2)
    assert len(curve(tmp_path / "parts")) == 4 and curve(tmp_path / "parts") == curve(tmp_path / "whole")
