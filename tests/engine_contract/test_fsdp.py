"""The FSDP engine keeps the contract: in this process, and on two and four real ones."""

import pytest

from tests.engine_contract.launches import CONTRACTS, launched


@pytest.mark.parametrize("case", CONTRACTS["fsdp_1"])
def test_in_one_process(case: str) -> None:
    CONTRACTS["fsdp_1"][case](0, 1)


test_on_ranks = launched("fsdp", 2, 4)
