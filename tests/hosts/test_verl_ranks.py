"""verl's real engines with Flathead in them, on two gloo processes: the cases are in verl_cases.py."""

import pytest

from tests.hosts.verl_cases import TWO_RANKS
from tests.support.ranks import run_cases
from tests.support.verl_engine import verl_environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    with verl_environment():
        return run_cases("tests.hosts.verl_cases:TWO_RANKS", 2, tmp_path_factory.mktemp("verl"), timeout=300.0)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == ["ok", "ok"], "\n".join(outcomes[name])
