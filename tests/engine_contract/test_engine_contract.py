"""Every engine keeps the contract: in this process, and on two and four real ones (one launch each)."""

import pytest

from tests.engine_contract import four_ranks, two_ranks
from tests.engine_contract.contract import contract
from tests.support.ranks import run_cases

ONE_PROCESS = contract(1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(two_ranks.__name__, 2, tmp_path_factory.mktemp("two"), timeout=600.0)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(four_ranks.__name__, 4, tmp_path_factory.mktemp("four"), timeout=600.0)


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_in_one_process(case: str) -> None:
    ONE_PROCESS[case](0, 1)


@pytest.mark.parametrize("case", two_ranks.CASES)
def test_on_two_ranks(case: str, two: dict[str, list[str]]) -> None:
    assert two[case] == ["ok"] * 2, "\n".join(two[case])


@pytest.mark.parametrize("case", four_ranks.CASES)
def test_on_four_ranks(case: str, four: dict[str, list[str]]) -> None:
    assert four[case] == ["ok"] * 4, "\n".join(four[case])
