"""Flathead in TRL: real trainers with and without it, its functions against float64, and what it refuses."""

import copy
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.sdft import loss_utils
from trl.trainer import utils

import flathead.integrations.trl as flat
from tests.support.counting import gemm_flops, saved_bytes_beyond, saved_tensors
from tests.support.memory import TensorMemory
from tests.support.models import tiny

if flat.replaced():
    flat.remove()  # importing applied it; each test says whether it wants it
NAMES = ["_ChunkedLogProbFunction", "_use_triton", "selective_log_softmax", "entropy_from_logits"]
NAMES += ["selective_log_softmax_and_entropy"]
STOCK = {name: getattr(utils, name) for name in NAMES}


@pytest.fixture
def applied() -> Iterator[None]:
    flat.apply()
    yield
    flat.remove()


def in_place() -> bool:
    """All of it or, checked too, none."""
    found = {name for name in NAMES if getattr(utils, name) is not STOCK[name]}
    assert found in (set(), set(NAMES)), f"half applied: {found}"
    return bool(found)


def tokenizer(path: Path, size: int) -> PreTrainedTokenizerFast:
    """Words w4 w5 ... for the ids 4, 5, ..."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(4, size))]
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    rest = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    (path / "words.json").write_text(json.dumps({**rest, **parts, "model": model}))
    return PreTrainedTokenizerFast(tokenizer_file=str(path / "words.json"), **special)


def odd_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def build(kind: str, path: Path, vocab_size: int, **options: Any) -> Any:
    config_class, trainer_class = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[kind]
    tiny("qwen3", vocab_size=vocab_size).save_pretrained(path / "model")
    common = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "optim": "sgd",  # Adam would make a whole step of the rounding of a gradient near zero
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
        "model_init_kwargs": {"dtype": "float32"},
    }
    words = tokenizer(path, vocab_size)
    data = Dataset.from_list([{"prompt": f"w{5 + i} w{9 + 2 * i}" + " w7" * (i % 3)} for i in range(16)])
    config = config_class(str(path), **{**common, **options})
    return trainer_class(
        str(path / "model"), reward_funcs=odd_words, args=config, train_dataset=data, processing_class=words
    )


CURVE = ("loss", "entropy", "grad_norm", "kl", "reward")


def trained(kind: str, path: Path, vocab_size: int, **options: Any) -> tuple[dict[str, list], dict[str, Tensor]]:
    """(the logged curves, the final weights)."""
    trainer = build(kind, path, vocab_size, **options)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    curves = {name: [entry[name] for entry in history if name in entry] for name in CURVE}
    return curves, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


RUNS: list[Any] = [
    pytest.param("grpo", {"temperature": 1.0}, id="grpo"),
    pytest.param(
        "grpo",
        {
            "temperature": 0.7,
            "beta": 0.04,
            "entropy_coef": 0.05,
            "top_entropy_quantile": 0.5,
            "mask_truncated_completions": True,
            "num_iterations": 2,
        },
        id="grpo with everything",
    ),
    pytest.param(
        "grpo", {"cast_lm_head_to_fp32": True, "gradient_checkpointing": False, "bf16": True}, id="grpo in bf16"
    ),
    pytest.param("rloo", {"temperature": 0.7, "beta": 0.05}, id="rloo"),
]


@pytest.mark.parametrize(("kind", "options"), RUNS)
def test_a_trainer_learns_the_same(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    curves, weights = trained(kind, tmp_path, 61, **options)
    assert len(curves["loss"]) == 4 and any(curves["loss"]) and any(curves["grad_norm"])

    genuine = flat.linear_token_stats
    monkeypatch.setattr(flat, "linear_token_stats", lambda *a, **k: (calls.append(k["stats"]), genuine(*a, **k))[1])
    flat.apply()
    try:
        flat_curves, flat_weights = trained(kind, tmp_path, 61, **options)
    finally:
        flat.remove()
    assert calls.count(("log_prob", "entropy")) >= 4, "not once a step"
    assert (("log_prob",) in calls) == ("beta" in options), "the reference model is asked for no entropy"
    loose = 50 if options.get("bf16") else 1
    for name, values in curves.items():
        assert flat_curves[name] == pytest.approx(values, rel=1e-4 * loose, abs=1e-5 * loose), name
    for name, weight in weights.items():
        torch.testing.assert_close(flat_weights[name], weight, rtol=1e-4 * loose, atol=2e-5 * loose, msg=name)


@contextmanager
def applying() -> Iterator[None]:
    flat.apply()
    try:
        yield
    finally:
        flat.remove()


def bytes_needed(path: Path) -> tuple[int, int]:
    """(peak of all tensors of two steps, sampling and optimizer included; saved by the forward of one loss)."""
    options = {"max_completion_length": 32, "max_steps": 2, "beta": 0.04, "gradient_checkpointing": False}
    trainer = build("grpo", path, VOCAB, **options)
    with TensorMemory() as memory:
        trainer.train()
    with saved_tensors() as saved:
        trainer.compute_loss(trainer.model, trainer._buffered_inputs[0])
    return memory.peak, saved_bytes_beyond(saved, *trainer.model.parameters())


VOCAB = 32_003


def test_a_step_needs_less_memory(tmp_path: Path) -> None:
    stock_peak, stock_saved = bytes_needed(tmp_path)
    with applying():
        peak, saved = bytes_needed(tmp_path)
    print(f"peak {stock_peak / 2**20:.1f} -> {peak / 2**20:.1f} MiB, saved {stock_saved} -> {saved} bytes")
    assert peak < 0.6 * stock_peak
    assert saved < stock_saved


def scoring(name: str, temperature: float, outputs: tuple[str, ...], **overrides: Any) -> tuple[Any, Any, dict]:
    """(stock model, the same with TRL's fused head, what that is called with)."""
    model = tiny(name, **overrides)
    fused = copy.deepcopy(model)
    utils.add_fused_lm_head(fused, temperature=temperature, outputs=outputs)
    ids = torch.randint(3, 512, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(11) < 4, -100)
    labels[0, -2:] = -100
    return model, fused, {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def truth(model: PreTrainedModel, call: dict, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """log_probs, entropy, ln sum p^2 (B, T - 1) from the model's own logits in float64; 0 where there is no label."""
    logits = model(call["input_ids"], attention_mask=call["attention_mask"]).logits[:, :-1].double()
    labels = call["labels"][:, 1:]
    log_p = torch.log_softmax(logits / temperature, -1)
    log_prob = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    values = log_prob, -(log_p.exp() * log_p).sum(-1), torch.logsumexp(2 * log_p, -1)
    return tuple(value * (labels != -100) for value in values)  # type: ignore[return-value]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite", "mixtral", "llama compiled"])
def test_the_fused_head_against_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = ("log_probs", "entropy", "log_sum_sq_probs")
    name, _, compiled = name.partition(" ")
    model, fused, call = scoring(name, 0.7, outputs)
    if name == "llama":
        for one in (model, fused):
            one.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 512))
    monkeypatch.setattr(STOCK["_ChunkedLogProbFunction"], "apply", lambda *_: pytest.fail("TRL's own was called"))
    log_prob, entropy, log_squares = truth(model, call, 0.7)
    run = torch.compile(fused, backend="aot_eager") if compiled else fused
    out = run(**call, fused_lm_head=True)
    torch.testing.assert_close(out.log_probs.double(), log_prob, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.log_sum_sq_probs.double(), log_squares, rtol=1e-5, atol=2e-5)
    assert not out.log_sum_sq_probs.requires_grad and out.mean_logits is out.is_top1 is None
    expected = gradients(model, (log_prob + 0.3 * entropy).sum())
    got = gradients(fused, (out.log_probs + 0.3 * out.entropy).sum())
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=2e-4, atol=2e-6 + 2e-5 * float(value.abs().max()), msg=key)


def test_masked_tokens_cost_nothing() -> None:
    """On a CPU TRL projects every token and masks afterwards; the difference is exactly the masked ones' products."""
    model, fused, call = scoring("llama", 1.0, ("log_probs",))
    with torch.no_grad():
        stock = gemm_flops(lambda: fused(**call, fused_lm_head=True))
        with applying():
            ours = gemm_flops(lambda: fused(**call, fused_lm_head=True))
    masked = (call["labels"][:, 1:] == -100).sum().item()
    assert masked > 0 and stock - ours == 2 * masked * model.lm_head.weight.numel()


def test_a_head_of_another_dtype_than_the_hidden_states() -> None:
    _, fused, call = scoring("llama", 1.0, ("log_probs", "entropy"), tie_word_embeddings=False)
    fused.bfloat16().lm_head.float()
    stock = fused(**call, fused_lm_head=True)
    with applying():
        out = fused(**call, fused_lm_head=True)
    torch.testing.assert_close(out.log_probs, stock.log_probs, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out.entropy, stock.entropy, rtol=1e-2, atol=1e-2)
    (out.log_probs + out.entropy).sum().backward()
    assert fused.lm_head.weight.grad.dtype == torch.float32


@pytest.mark.usefixtures("applied")
def test_a_batch_without_any_label_gives_zero_and_zero_gradients() -> None:
    _, fused, call = scoring("llama", 1.0, ("log_probs", "entropy"))
    out = fused(**{**call, "labels": torch.full_like(call["labels"], -100)}, fused_lm_head=True)
    assert torch.all(out.log_probs == 0) and torch.all(out.entropy == 0)
    assert all(torch.all(grad == 0) for grad in gradients(fused, out.log_probs.sum() + out.entropy.sum()).values())


@pytest.mark.parametrize("why", ["is_top1", "mean_logits", "ZeRO-3"])
def test_what_flathead_lacks_stays_with_trl(why: str, caplog: pytest.LogCaptureFixture) -> None:
    outputs = ("log_probs", "entropy") if why == "ZeRO-3" else ("log_probs", why)
    _, fused, call = scoring("llama", 1.0, outputs)
    expected = fused(**call, fused_lm_head=True)
    if why == "ZeRO-3":
        fused.lm_head.weight.ds_id = 0  # what DeepSpeed marks its parameters with
    caplog.set_level(logging.INFO, logger="flathead")
    flat._told.clear()
    with applying():
        got = [fused(**call, fused_lm_head=True) for _ in range(2)]
    for name, value in expected.items():
        torch.testing.assert_close(got[1][name], value)
    assert caplog.text.count("left to TRL's own function") == 1 and why in caplog.text


@pytest.mark.usefixtures("applied")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_functions_on_logits(temperature: float, masked: bool, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(2, 5, 37, generator=random)).to(dtype).requires_grad_()
    index = torch.randint(37, (2, 5), generator=random)
    row_mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]) if masked else None
    keep = torch.ones(2, 5) if row_mask is None else row_mask
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    log_prob = log_p.gather(-1, index[..., None])[..., 0] * keep
    entropy = -(log_p.exp() * log_p).sum(-1)
    close: Callable[..., None] = lambda got, value: torch.testing.assert_close(  # noqa: E731
        got.double(), value.double(), rtol=1e-5 if got.dtype == torch.float32 else 1e-2, atol=1e-5
    )
    options = {"temperature": temperature, "row_mask": row_mask}
    close(utils.selective_log_softmax(logits, index, **options), log_prob)
    close(loss_utils.selective_log_softmax(logits, index, **options), log_prob)
    several = torch.stack([index, (index + 1) % 37], -1)
    both_masked = None if row_mask is None else torch.stack([row_mask, row_mask], -1)
    got = utils.selective_log_softmax(logits, several, temperature, both_masked)
    close(got, log_p.gather(-1, several) * keep[..., None])
    joint, joint_entropy = utils.selective_log_softmax_and_entropy(logits, index, True, **options)
    close(joint, log_prob), close(joint_entropy, entropy * keep)
    expected = torch.autograd.grad((log_prob + 0.3 * entropy * keep).sum(), logits)[0]
    close(torch.autograd.grad((joint + 0.3 * joint_entropy).sum(), logits)[0], expected)
    assert not utils.selective_log_softmax_and_entropy(logits, index, False)[1].requires_grad
    log_p_whole = torch.log_softmax(logits.double(), -1)
    close(utils.entropy_from_logits(logits, chunk_size=3), -(log_p_whole.exp() * log_p_whole).sum(-1))
    with pytest.raises(ValueError, match="temperature"):
        utils.selective_log_softmax(logits, index, temperature=0.0)
