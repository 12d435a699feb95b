"""The table engine x layout of docs/engines.md is the list of layouts whose contract is tested, no more and no less."""

import re
from pathlib import Path

from tests.engine_contract import contract
from tests.engine_contract.engines import ENGINES
from tests.engine_contract.launches import CONTRACTS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "engines.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]


def test_the_tables_layouts_are_the_tested_ones() -> None:
    (header,) = (row for row in ROWS if row[1:2] == ["fsdp"])
    cells = [row for row in ROWS if len(row) == len(header) and row is not header and not row[1].startswith("---")]
    assert all(cell == "—" or re.fullmatch(r"`[\w+-]+`", cell) for row in cells for cell in row[1:])
    named = [f"{engine}-{row[i].strip('`')}" for i, engine in enumerate(header) if i for row in cells if row[i] != "—"]
    assert sorted(named) == sorted(row.name for row in ENGINES)


def test_what_all_engines_do_is_tested_in_all_layouts() -> None:
    named = [row[1].strip("`") for row in ROWS if len(row) == 2 and row[1].startswith("`")]
    assert all(callable(getattr(contract, name)) for name in named)
    for row in ENGINES:
        cases = {case.removeprefix(f"{row.name} ") for case in CONTRACTS[f"{row.family}_{row.world}"]}
        trained = {name for name in cases if name.rpartition(" ")[2] in contract.PATHS}
        assert {name.rpartition(" ")[2] for name in trained} == contract.PATHS.keys()
        assert {name for name in named if name not in cases} == {"training_equals_the_plain_loop"}
