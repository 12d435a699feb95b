"""The NeMo Automodel engine keeps the contract on one, two and four processes, where that package is installed."""

from tests.engine_contract.launches import launched

test_on_ranks = launched("automodel", 1, 2, 4)
