"""The packages whose tests run in an environment of their own: `make test-torchtitan`, ..."""

from importlib import metadata
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Of each: the distribution, and the test modules that need it. The main environment has Megatron-Core.
BACKENDS = {
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
    "verl": ("verl", ("hosts/test_verl.py",)),
    "trl": ("trl", ("hosts/test_trl.py",)),
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
        ran = [r.outcome for r in reports if r.when == "call" and r.nodeid.partition("::")[0][6:] in modules]
        if (found := version(name)) is not None and ran:
            lines.append(f"{name} ({distribution} {found}): {ran.count('passed')} of {len(ran)} tests passed")
    return lines
