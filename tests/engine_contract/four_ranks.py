"""What is launched on four processes."""

from tests.engine_contract.contract import contract

CASES = contract(4)
