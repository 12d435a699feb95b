"""The drop-in names on Megatron's own process groups: 2 and 4 real processes, one launch each."""

import pytest
import torch

from tests.distributed import megatron_cases as cases
from tests.support.ranks import run_cases


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(f"{cases.__name__}:TWO", 2, tmp_path_factory.mktemp("two"), timeout=300.0)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(f"{cases.__name__}:FOUR", 4, tmp_path_factory.mktemp("four"), timeout=300.0)


@pytest.mark.parametrize("case", cases.TWO)
def test_on_two_ranks(case: str, two: dict[str, list[str]]) -> None:
    assert two[case] == ["ok"] * 2, "\n".join(two[case])


@pytest.mark.parametrize("case", cases.FOUR)
def test_on_four_ranks(case: str, four: dict[str, list[str]]) -> None:
    assert four[case] == ["ok"] * 4, "\n".join(four[case])


@pytest.mark.parametrize("name", cases.NAMES)
def test_without_megatrons_groups_it_says_so(name: str) -> None:
    with pytest.raises(ValueError, match="initialize_model_parallel first"):
        cases.NAMES[name](torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"expected a tensor \(\.\.\., V / tp\)|initialize_model_parallel"):
        cases.NAMES[name](torch.tensor(1.0), torch.tensor(0))
