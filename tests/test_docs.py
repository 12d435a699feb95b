"""The README and docs/ say what is so: every Python block is executed, every command is run.

Python blocks of a page are executed in order, in one namespace, and its commands in one directory. A command is run as
it stands where that takes seconds. What takes minutes is run with the arguments in SHORTENED after its own: the same
code, a tiny model and few steps. `make` is asked what it would run, and each of that is a command like any other. Left
out are installing, the test suite within itself, and what `make lint` runs: whoever sees a result of this test has just
run them.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BIN = Path(sys.executable).parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")

TRAIN = (
    "trainer.steps=1 data.train_batch_size=2 actor.ppo_mini_batch_size=2 rollout.n=2 data.val_size=4 "
    "data.max_response_length=4"
)
SHORTENED = {
    "flathead bench": "--tokens 16 --vocab 512 --hidden 16 --rounds 1",
    "python docs/megatron_memory.py": "--tokens 64 --vocab 512 --hidden 16 --tp 1 2",
    "flathead train --help": "",
    "flathead train": TRAIN,
    "torchrun --nproc-per-node 2 -m flathead.cli train": TRAIN,
}


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    stripped = (line.split("  #")[0].strip() for block in blocks(page, "bash") for line in block.splitlines())
    return list(dict.fromkeys(line for line in stripped if line))


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 130 000 weights without training, with SmolLM2's tokenizer and chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from flathead.pretrained import load_tokenizer

    tokenizer = load_tokenizer(None)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **ends)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, namespace = page.read_text(), {"__name__": "__main__"}
    for block in blocks(page, "python"):
        line = text[: text.index(block)].count("\n")
        tree = ast.increment_lineno(ast.parse(block), line)
        exec(compile(tree, name(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_are_of_a_kind_that_is_checked(page: Path) -> None:
    languages = {found for found, _ in BLOCK.findall(page.read_text())}
    allowed = {"python", "bash", "text"}  # text: output, and the drawing of a directory
    assert languages <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_commands_run(page: Path, tmp_path: Path, model: Path) -> None:
    (tmp_path / "MODEL").symlink_to(model)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for command in commands(page):
        for line in what_runs(command):
            short = shortened(line)
            done = subprocess.run(
                short, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{short}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def what_runs(command: str) -> Iterator[str]:
    """The commands behind a command of `make`; none for those that the header says are left out."""
    words = shlex.split(command)
    if words[0] == "make":
        dry = [*words, "--dry-run", "--no-print-directory", f"VENV={BIN.parent}"]
        lines = subprocess.run(dry, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True, timeout=60)
        for line in lines.stdout.splitlines():
            if line.startswith(f"{BIN}/"):
                yield from what_runs(line.removeprefix(f"{BIN}/").removesuffix("\\"))  # of a longer command
    elif words[0] == "pip":
        assert_installable(words)
    elif words[0] not in ("ruff", "pyright") and words[:2] != ["python", "-m"]:
        yield command


def assert_installable(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"\.\[([\w,-]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= extras.keys()
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).exists()


def shortened(line: str) -> str:
    arguments = next((more for start, more in SHORTENED.items() if line.startswith(start)), "")
    tiny = "model.path=MODEL" if arguments == TRAIN and "model.path=" not in line else ""
    return f"{line} {arguments} {tiny}".strip()


def environment() -> dict[str, str]:
    left_out = ("MAKEFLAGS", "MAKELEVEL", "ARGS", "VENV", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{kept['PATH']}", "PYTHONPATH": str(ROOT)}
