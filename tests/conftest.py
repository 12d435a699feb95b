"""Settings every test shares: repeatable property tests without time limits, slow tests last."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.backends import missing_modules, summary

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    launched = ("distributed", "engine_contract")  # real processes: later than what runs in this one
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, item.path.parent.name in launched))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which backends ran, at which versions; also into the file that `make test` gathers from all environments."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    for line in summary(reports):
        terminalreporter.write_line(line)
        if path := os.environ.get("FLATHEAD_TEST_SUMMARY"):
            with Path(path).open("a") as file:
                file.write(line + "\n")
