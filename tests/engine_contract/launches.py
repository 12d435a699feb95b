"""The contract on real processes: one launch for each family of engines and number of ranks."""

from collections.abc import Callable

import pytest

from tests.engine_contract.contract import contract
from tests.engine_contract.engines import ENGINES
from tests.support.ranks import run_cases

CONTRACTS = {
    f"{family}_{world}": contract(family, world)
    for family, world in dict.fromkeys((row.family, row.world) for row in ENGINES)
}
globals().update(CONTRACTS)  # a launched process finds its cases by name


def launched(family: str, *worlds: int, timeout: float = 900.0) -> Callable[..., None]:
    """The test of every case of that family on that many ranks: all that a test module of an engine needs."""
    cases = [(world, case) for world in worlds for case in CONTRACTS[f"{family}_{world}"]]
    outcomes: dict[int, dict[str, list[str]]] = {}

    @pytest.mark.timeout(timeout + 60)
    @pytest.mark.parametrize(("world", "case"), cases, ids=[case for _, case in cases])
    def test(world: int, case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        if world not in outcomes:
            directory = tmp_path_factory.mktemp(f"{family}_{world}")
            outcomes[world] = run_cases(f"{__name__}:{family}_{world}", world, directory, timeout)
        assert outcomes[world][case] == ["ok"] * world, "\n".join(outcomes[world][case])

    return test
