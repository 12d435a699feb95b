"""The vocabulary sharded over 2, 3 and 4 real processes: one launch a world size, one test a case."""

import pytest

from tests.distributed import vocab_parallel_cases as cases
from tests.support.ranks import run_cases


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda world: f"{world} ranks")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(cases.__name__, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", cases.CASES)
def test_on_every_rank(case: str, outcomes: dict[str, list[str]]) -> None:
    for rank, outcome in enumerate(outcomes[case]):
        assert outcome == "ok", f"rank {rank}: {outcome}"
