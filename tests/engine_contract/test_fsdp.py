"""The FSDP engine keeps the contract: in this process, and on two and four real ones (one launch each)."""

import pytest

from tests.engine_contract import launches
from tests.engine_contract.contract import contract
from tests.support.ranks import run_cases

ONE_PROCESS = contract("fsdp", 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(f"{launches.__name__}:FSDP_2", 2, tmp_path_factory.mktemp("two"), timeout=600.0)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(f"{launches.__name__}:FSDP_4", 4, tmp_path_factory.mktemp("four"), timeout=600.0)


@pytest.mark.parametrize("case", ONE_PROCESS)
def test_in_one_process(case: str) -> None:
    ONE_PROCESS[case](0, 1)


@pytest.mark.parametrize("case", launches.FSDP_2)
def test_on_two_ranks(case: str, two: dict[str, list[str]]) -> None:
    assert two[case] == ["ok"] * 2, "\n".join(two[case])


@pytest.mark.parametrize("case", launches.FSDP_4)
def test_on_four_ranks(case: str, four: dict[str, list[str]]) -> None:
    assert four[case] == ["ok"] * 4, "\n".join(four[case])
