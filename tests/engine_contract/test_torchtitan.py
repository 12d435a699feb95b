"""The TorchTitan engine keeps the contract on one, two and four processes. Runs where it is installed."""

from tests.engine_contract.launches import launched

test_on_ranks = launched("torchtitan", 1, 2, 4)
