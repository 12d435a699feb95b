"""Settings every test shares: repeatable property tests without time limits, slow tests last, one backend's tests."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.backends import BACKENDS, missing_modules, summary, version

collect_ignore = missing_modules()

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=40,
    print_blob=True,
    # Building tensors is slow beside drawing integers; the number of examples bounds the time instead.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("explore", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=list(BACKENDS), help="only the tests that need this backend's package")


def pytest_configure(config: pytest.Config) -> None:
    backend = config.getoption("--backend")
    if backend is not None and version(backend) is None:
        raise pytest.UsageError(f"{BACKENDS[backend][0]} is not installed; make test-{backend} installs it")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    backend = config.getoption("--backend")
    if backend is None or not collection_path.is_file():
        return None
    return collection_path.relative_to(Path(__file__).parent).as_posix() not in BACKENDS[backend][1] or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    launched = ("distributed", "engine_contract")  # real processes: later than what runs in this one
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, item.path.parent.name in launched))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which backends ran, at which versions; also into the file that `make test` gathers from all environments."""
    kinds = ("passed", "failed", "error")
    reports = [r for kind in kinds for r in terminalreporter.stats.get(kind, []) if isinstance(r, pytest.TestReport)]
    for line in summary(reports):
        terminalreporter.write_line(line)
        if path := os.environ.get("FLATHEAD_TEST_SUMMARY"):
            with Path(path).open("a") as file:
                file.write(line + "\n")
