"""What is launched on real processes: one launch for each family of engines and number of ranks."""

from tests.engine_contract.contract import contract

FSDP_2, FSDP_4 = contract("fsdp", 2), contract("fsdp", 4)
MEGATRON_1, MEGATRON_2, MEGATRON_4 = contract("megatron", 1), contract("megatron", 2), contract("megatron", 4)
