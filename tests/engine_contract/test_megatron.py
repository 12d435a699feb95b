"""The Megatron engine keeps the contract on one, two and four processes; its groups are global: not in this one."""

import pytest

from tests.engine_contract import launches
from tests.support.ranks import run_cases


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(f"{launches.__name__}:MEGATRON_1", 1, tmp_path_factory.mktemp("one"), timeout=600.0)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(f"{launches.__name__}:MEGATRON_2", 2, tmp_path_factory.mktemp("two"), timeout=900.0)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(f"{launches.__name__}:MEGATRON_4", 4, tmp_path_factory.mktemp("four"), timeout=900.0)


@pytest.mark.parametrize("case", launches.MEGATRON_1)
def test_in_one_process(case: str, one: dict[str, list[str]]) -> None:
    assert one[case] == ["ok"], "\n".join(one[case])


@pytest.mark.parametrize("case", launches.MEGATRON_2)
def test_on_two_ranks(case: str, two: dict[str, list[str]]) -> None:
    assert two[case] == ["ok"] * 2, "\n".join(two[case])


@pytest.mark.parametrize("case", launches.MEGATRON_4)
def test_on_four_ranks(case: str, four: dict[str, list[str]]) -> None:
    assert four[case] == ["ok"] * 4, "\n".join(four[case])
