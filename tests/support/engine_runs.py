"""What every engine's `flathead train` is held to: the same run as on the FSDP engine, and exact continuation.

In processes of their own: the frameworks' groups are global.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flathead.cli import main
from flathead.config import CONFIG_NAMES, STRATEGIES
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


def trained(
    strategy: str, model: Path, run_dir: Path, *options: str, processes: int = 1, steps: int = 3, expected: int = 0
) -> str:
    """options: of the actor's engine, such as `dtype=float32`. Returns what the command printed."""
    key = STRATEGIES[strategy].key
    overrides = [f"actor.{key}.{option}" for option in options]
    words = command(model, run_dir, *EXACT, f"trainer.steps={steps}", *overrides)
    process = start([*words, "--config-name", CONFIG_NAMES[strategy]], torchrun(processes) if processes > 1 else ())
    output, _ = process.communicate(timeout=400)
    assert process.returncode == expected, output
    return output


def the_same_run_as_with_fsdp(strategy: str, layouts: dict[str, tuple[int, tuple[str, ...]]]) -> Callable[..., None]:
    """layouts: name -> processes, and the options that divide the model over them."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("processes", "layout"), layouts.values(), ids=layouts)
    def test(model: Path, fsdp: Path, tmp_path: Path, processes: int, layout: tuple[str, ...]) -> None:
        output = trained(strategy, model, tmp_path / "run", "dtype=float32", *layout, processes=processes)
        assert len(curve(fsdp)) == 3
        for ours, theirs in zip(curve(tmp_path / "run"), curve(fsdp), strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-5)
        assert output.count("held-out accuracy: before") == 1
        from transformers import AutoModelForCausalLM

        mine, its = (AutoModelForCausalLM.from_pretrained(path / "final") for path in (tmp_path / "run", fsdp))
        assert type(mine) is type(its)
        for got, wanted in zip(mine.parameters(), its.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-3)  # steps of 5e-3

    return test


def goes_on_exactly(strategy: str, *layout: str) -> Callable[..., None]:
    """On two ranks, in bf16: masters, moments and schedule are all in the checkpoint. Another layout reads it too."""

    @pytest.mark.slow
    def test(model: Path, tmp_path: Path) -> None:
        whole, parts, alone = (tmp_path / name for name in ("whole", "parts", "alone"))
        trained(strategy, model, whole, *layout, processes=2, steps=4)
        trained(strategy, model, parts, *layout, processes=2, steps=2)
        trained(strategy, model, parts, *layout, processes=2, steps=4)
        assert len(curve(parts)) == 4 and curve(parts) == curve(whole)
        trained(strategy, model, alone, "dtype=float32", *layout, processes=2, steps=2)
        trained(strategy, model, alone, "dtype=float32", processes=1, steps=3)
        assert [record["step"] for record in curve(alone)] == [1, 2, 3]

    return test
