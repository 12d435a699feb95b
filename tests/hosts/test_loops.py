"""`install` in other people's loops: losses, gradients and weights are those of the same loop on logits.

Real Accelerate; torch.compile; activation checkpointing. Of Lightning only the shape of its loop (training_step,
configure_optimizers, a fit that calls them), written out here: the package itself is not among the dependencies.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from flathead import install
from tests.support.models import tiny

TEMPERATURE, BONUS = 0.8, 0.05
Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]
Run = tuple[list[float], list[dict[str, Tensor]]]  # of every step: the loss, and the gradients it left


def batches() -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    rows = []
    for length in (3, 5, 4, 2, 6, 3, 4, 5):
        ids = torch.randint(3, 512, (11,), generator=random)
        labels = ids.masked_fill(torch.arange(11) < length, -100)
        rows.append({"ids": ids, "labels": labels, "advantage": torch.randn((), generator=random)})
    return list(DataLoader(rows, batch_size=2))  # type: ignore[arg-type]


def policy_loss(log_prob: Tensor, entropy: Tensor, batch: Batch) -> Tensor:
    live = batch["labels"][:, 1:] != -100
    return -((batch["advantage"][:, None] * log_prob + BONUS * entropy) * live).sum() / live.sum()


def from_logits(model: Any, batch: Batch) -> Tensor:
    log_p = torch.log_softmax(model(batch["ids"]).logits[:, :-1].float() / TEMPERATURE, -1)
    log_prob = log_p.gather(-1, batch["labels"][:, 1:].clamp(min=0)[..., None])[..., 0]
    return policy_loss(log_prob, -(log_p.exp() * log_p).sum(-1), batch)


def from_flathead(model: Any, batch: Batch) -> Tensor:
    out = model(batch["ids"], labels=batch["labels"], temperature=TEMPERATURE)
    assert out.logits is None
    return policy_loss(out.log_probs[:, :-1], out.entropy[:, :-1], batch)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_loop(model: nn.Module, called: Any, loss_of: Loss, steps: int = 4) -> Run:
    """`called`: what stands for the model in the loop, such as a compiled one with the same parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, grads = [], []
    for batch in batches()[:steps]:
        optimizer.zero_grad()
        loss = loss_of(called, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append(gradients(model))
        optimizer.step()
    return losses, grads


def assert_same(got: Run, expected: Run, tolerance: float = 1.0) -> None:
    assert len(set(expected[0])) == len(expected[0]) == len(got[0]) >= 2, "every step has a loss of its own"
    assert got[0] == pytest.approx(expected[0], rel=2e-5 * tolerance, abs=2e-6 * tolerance)
    for step, (one, other) in enumerate(zip(got[1], expected[1], strict=True)):
        assert one.keys() == other.keys() and one
        for name, value in other.items():
            error = float((one[name] - value).norm() / value.norm())
            assert error < 1e-4 * tolerance, f"step {step}: {name} is off by {error:.1e}"


def accelerate_loop(model: PreTrainedModel, loss_of: Loss, precision: str, prepare_first: bool) -> Run:
    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one, and its precision
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if loss_of is from_flathead and not prepare_first:
        install(model)
    prepared, optimizer, data = accelerator.prepare(model, optimizer, batches())
    if loss_of is from_flathead and prepare_first:
        install(accelerator.unwrap_model(prepared))
    losses, grads = [], []
    for batch in data:
        with accelerator.accumulate(prepared):
            loss = loss_of(prepared, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            losses.append(float(loss.detach()))
            grads.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    return losses, grads


@pytest.mark.parametrize("prepare_first", [False, True], ids=["install, prepare", "prepare, install"])
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1.0), ("bf16", 300.0)])
def test_an_accelerate_loop(precision: str, tolerance: float, prepare_first: bool) -> None:
    expected = accelerate_loop(tiny("qwen3"), from_logits, precision, prepare_first)
    got = accelerate_loop(tiny("qwen3"), from_flathead, precision, prepare_first)
    assert_same(got, expected, tolerance)


class PolicyModule(nn.Module):
    """What one writes for Lightning, on nn.Module: the loss in training_step, the optimizer elsewhere."""

    def __init__(self, model: PreTrainedModel, loss_of: Loss) -> None:
        super().__init__()
        self.model = install(model) if loss_of is from_flathead else model
        self.loss_of = loss_of

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def lightning_shaped_fit(module: PolicyModule) -> Run:
    """As Lightning's automatic optimization: the step runs inside the optimizer's closure."""
    optimizer = module.configure_optimizers()
    losses, grads = [], []
    for index, batch in enumerate(batches()):

        def closure(index: int = index, batch: Batch = batch) -> float:
            optimizer.zero_grad()
            loss = module.training_step(batch, index)
            loss.backward()
            grads.append(gradients(module))
            return float(loss.detach())

        losses.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
    return losses, grads


def test_a_loop_of_lightnings_shape() -> None:
    expected = lightning_shaped_fit(PolicyModule(tiny("gemma2"), from_logits))
    assert_same(lightning_shaped_fit(PolicyModule(tiny("gemma2"), from_flathead)), expected)


@pytest.mark.parametrize("order", ["install, compile", "compile, install", "install, compile in place"])
def test_a_compiled_model(order: str) -> None:
    stock, model = tiny("llama", num_hidden_layers=1), tiny("llama", num_hidden_layers=1)
    expected = plain_loop(stock, stock, from_logits, steps=2)
    torch.compiler.reset()
    if order == "compile, install":
        called = torch.compile(model, backend="eager")
        with pytest.raises(ValueError, match="expected a causal LM with `labels`, got OptimizedModule"):
            install(called)  # its forward is the compiler's; the model within is what to install on
        install(model)
    elif order == "install, compile":
        called = torch.compile(install(model), backend="eager")
    else:
        called = install(model)
        called.compile(backend="eager")
    assert_same(plain_loop(model, called, from_flathead, steps=2), expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("install_first", [False, True], ids=["checkpoint, install", "install, checkpoint"])
def test_activation_checkpointing(reentrant: bool, install_first: bool) -> None:
    stock, model = tiny("qwen3"), tiny("qwen3")
    expected = plain_loop(stock, stock, from_logits)
    if install_first:
        install(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if not install_first:
        install(model)
    layers = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: layers.append(1))
    assert_same(plain_loop(model, model, from_flathead), expected)
    assert len(layers) == 2 * len(model.model.layers) * len(batches()), "every layer runs again in backward"
