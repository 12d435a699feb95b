"""What is launched on two processes."""

from tests.engine_contract.contract import contract

CASES = contract(2)
