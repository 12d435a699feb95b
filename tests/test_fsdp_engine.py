"""The FSDP engine in one process: packed attention, other families, generation, frozen models, and what it refuses."""

from typing import Any

import pytest
import torch

from flathead.batch import PackedBatch
from flathead.config import FSDPEngineConfig, OptimConfig
from flathead.engines.fsdp import FSDPEngine, check_layout
from flathead.engines.tensor_parallel import check_tensor_parallel
from tests.engine_contract.reference import STATS, TEMPERATURE, loss_fn, naive_stats, whole_batch
from tests.support.models import tiny


def engine(model: Any, **options: Any) -> FSDPEngine:
    return FSDPEngine(model, FSDPEngineConfig(**{"dtype": "float32", **options}), OptimConfig(lr=1e-3))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "cohere2", "mixtral"])
@pytest.mark.parametrize("lm_head", ["fused", "logits"])
def test_packed_sequences_are_as_if_each_were_alone(name: str, attention: str, lm_head: str) -> None:
    if name == "gemma2" and attention == "sdpa":
        attention = "eager"  # its soft-capped attention has no sdpa
    model, batch = tiny(name, attn_implementation=attention), whole_batch()
    expected = naive_stats(model.eval(), batch)
    gradients = torch.autograd.grad((batch.weight_N * loss_fn(expected, batch)[0]).sum(), list(model.parameters()))
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    packed = engine(model, lm_head=lm_head)
    stats = packed.token_stats(batch, STATS, temperature=TEMPERATURE)
    for key in STATS:
        torch.testing.assert_close(getattr(stats, key), getattr(expected, key), rtol=2e-5, atol=2e-5)
    got = packed.train_step(batch, loss_fn, STATS, temperature=TEMPERATURE)
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_sliding_windows_stay(name: str) -> None:
    model = tiny(name, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    batch = whole_batch()
    assert max(batch.lengths) > 3
    expected = naive_stats(model.eval(), batch)
    stats = engine(model).token_stats(batch, STATS, temperature=TEMPERATURE)
    for key in STATS:
        torch.testing.assert_close(getattr(stats, key), getattr(expected, key), rtol=2e-5, atol=2e-5)


def test_no_mask_is_made_and_memory_grows_with_the_tokens_only() -> None:
    from tests.support.memory import TensorMemory

    peaks = []
    for sequences in (2048, 4096):
        batch = PackedBatch.from_sequences([[3, 4]] * sequences, [[5, 6]] * sequences)
        packed = engine(tiny("llama"))
        with TensorMemory() as memory:
            packed.token_stats(batch)
        peaks.append(memory.peak)
        assert memory.peak < len(batch.input_ids_N) ** 2 // 2  # a mask has N * N bytes
    assert peaks[1] < 2.2 * peaks[0]


def test_the_model_still_generates() -> None:
    model, ids = tiny("llama").eval(), torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    before = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    trained = engine(model, dtype="bfloat16")
    trained.train_mode(False)
    after = trained.model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(before, after)


def test_a_frozen_model_gives_statistics() -> None:
    model, batch = tiny("qwen3").requires_grad_(False), whole_batch()
    expected = naive_stats(model, batch)
    stats = engine(model).token_stats(batch, STATS, temperature=TEMPERATURE)
    torch.testing.assert_close(stats.log_prob, expected.log_prob, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_checkpoint_is_trained_in_fp32_and_saved_as_it_came(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    trained = engine(tiny("llama").to(torch.bfloat16), dtype="bfloat16")
    assert {weight.dtype for _, weight in trained.full_weights()} == {torch.float32}
    trained.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, weight in trained.full_weights():
        assert torch.equal(loaded.get_parameter(name).float(), weight), name


def test_the_gradient_is_clipped_by_its_norm_and_the_learning_rate_warms_up() -> None:
    model = tiny("llama")
    trained = FSDPEngine(
        model, FSDPEngineConfig(dtype="float32"), OptimConfig(lr=1.0, clip_grad=1e-3, lr_warmup_steps=4)
    )
    seen: list[float] = []

    def remember(*_: Any) -> None:
        seen.append(float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()))

    trained.optimizer.register_step_pre_hook(remember)
    got = [trained.train_step(whole_batch(), loss_fn, STATS) for _ in range(5)]
    assert [step["lr"] for step in got] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert got[0]["grad_norm"] > 1e-2
    assert seen == pytest.approx([1e-3] * 5, rel=1e-3)


def test_what_is_refused() -> None:
    batch, trained = whole_batch(), engine(tiny("llama"))
    with pytest.raises(ValueError, match="weight_N: expected a positive sum"):
        trained.train_step(batch.replace(weight_N=torch.zeros_like(batch.weight_N)), loss_fn, STATS)
    with pytest.raises(ValueError, match=r"loss_fn: expected loss for each entry, \(\d+,\), got \(\)"):
        trained.train_step(batch, lambda stats, micro: (stats.log_prob.sum(), {}))
    with pytest.raises(ValueError, match="max_tokens 5 is less than the 14 tokens of sequence 2"):
        engine(tiny("llama"), max_token_len_per_gpu=5).token_stats(batch)
    with pytest.raises(FloatingPointError, match="gradient norm nan"):
        broken = batch.replace(advantages_N=torch.full_like(batch.weight_N, float("nan")))
        engine(tiny("llama")).train_step(broken, loss_fn, STATS)
    with pytest.raises(ValueError, match="lm_head"):
        engine(tiny("llama"), lm_head="sparse")
    with pytest.raises(ValueError, match="dtype: expected one of"):
        engine(tiny("llama"), dtype="float16")
    with pytest.raises(ValueError, match="stats_memory_budget"):
        engine(tiny("llama"), lm_head="logits", stats_memory_budget=1 << 20)
    with pytest.raises(ValueError, match="param_offload: has no effect in one process"):
        engine(tiny("llama"), param_offload=True)
    with pytest.raises(ValueError, match="expected a Hugging Face causal LM"):
        engine(torch.nn.Linear(2, 2))


def test_a_model_that_ignores_positions_cannot_be_packed() -> None:
    from transformers import AutoModelForCausalLM, GPTJConfig

    torch.manual_seed(0)
    config = GPTJConfig(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    forward = model.transformer.forward
    model.transformer.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match="lets packed sequences see each other"):
        engine(model)


def test_sizes_that_do_not_divide_are_shown() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size 2 does not divide the 1 processes"):
        engine(tiny("llama"), tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"fsdp_size 3 does not divide the 4 data-parallel ranks \(8 processes"):
        check_layout(FSDPEngineConfig(fsdp_size=3, tensor_parallel_size=2), 8)
    with pytest.raises(ValueError, match=r"tp\(3\) does not divide vocab_size 512; .* one of 1, 2"):
        check_tensor_parallel(tiny("llama"), 3)
    with pytest.raises(ValueError, match=r"tp\(2\) does not divide vocab_size 511"):
        check_tensor_parallel(tiny("llama", vocab_size=511), 2)
    with pytest.raises(ValueError, match="expected a model of llama, qwen2, qwen3, got gemma2"):
        check_tensor_parallel(tiny("gemma2"), 2)
    changed = tiny("llama")
    changed.model.layers[0].extra = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"extra.weight of LlamaForCausalLM has no place in the plan"):
        check_tensor_parallel(changed, 2)
