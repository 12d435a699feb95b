"""The Megatron engine keeps the contract on one, two and four processes; its groups are global: not in this one."""

from tests.engine_contract.launches import launched

test_on_ranks = launched("megatron", 1, 2, 4)
