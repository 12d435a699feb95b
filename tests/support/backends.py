"""The backends and their tests, some in environments of their own: `make test-torchtitan`, ...

    python -m tests.support.backends FILE NAME...

prints what the test runs wrote into FILE, and fails unless each named backend's tests ran.
"""

import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest

# Of each: the distribution, and the test modules that need it.
BACKENDS = {
    "fsdp": ("torch", ("engine_contract/test_fsdp.py", "test_fsdp_engine.py")),
    "megatron": (
        "megatron-core",
        (
            "engine_contract/test_megatron.py",
            "distributed/test_megatron_names.py",
            "test_megatron_engine.py",
            "test_trainer_megatron.py",
        ),
    ),
    "torchtitan": (
        "torchtitan",
        ("engine_contract/test_torchtitan.py", "test_torchtitan_engine.py", "test_trainer_torchtitan.py"),
    ),
    "automodel": (
        "nemo-automodel",
        ("engine_contract/test_automodel.py", "test_automodel_engine.py", "test_trainer_automodel.py"),
    ),
    "veomni": ("veomni", ("engine_contract/test_veomni.py", "test_veomni_engine.py", "test_trainer_veomni.py")),
    "verl": (
        "verl",
        (
            "hosts/test_verl.py",
            "hosts/test_verl_ranks.py",
            "hosts/test_verl_functions.py",
            "hosts/test_verl_applying.py",
            "hosts/test_verl_job.py",
        ),
    ),
}


def version(backend: str) -> str | None:
    try:
        return metadata.version(BACKENDS[backend][0])
    except metadata.PackageNotFoundError:
        return None


def missing_modules() -> list[str]:
    """Test modules whose package this environment does not have, relative to tests/."""
    return [module for name, (_, modules) in BACKENDS.items() if version(name) is None for module in modules]


def summary(reports: list[pytest.TestReport]) -> list[str]:
    """One line for each backend of this environment: version, and how many of its tests passed."""
    lines = []
    for name, (distribution, modules) in BACKENDS.items():
        own = [r for r in reports if r.nodeid.partition("::")[0].removeprefix("tests/") in modules]
        ran, failed = {r.nodeid for r in own}, {r.nodeid for r in own if r.failed}
        if ran and (found := version(name)) is not None:
            passed = f"{len(ran) - len(failed)} of {len(ran)} tests passed"
            lines.append(f"{name}: {passed} with {distribution} {found}, torch {metadata.version('torch')}")
    return lines


def report(lines: Iterable[str], wanted: list[str]) -> tuple[str, bool]:
    """(what ran and what did not, whether every wanted backend ran)."""
    ran = {line.partition(":")[0]: line for line in lines}
    shown = [ran.get(name, f"{name}: NOT RUN") for name in wanted]
    return "\n".join(["backends", *(f"  {line}" for line in shown)]), all(name in ran for name in wanted)


if __name__ == "__main__":
    file, wanted = Path(sys.argv[1]), sys.argv[2:]
    text, complete = report(file.read_text().splitlines() if file.exists() else [], wanted)
    print(text)
    sys.exit(not complete)
