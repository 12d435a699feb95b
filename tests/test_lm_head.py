"""install(): real Hugging Face models, against their own logits, loss and gradients."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast

from flathead.lm_head import install, uninstall
from tests.support.memory import TensorMemory
from tests.support.models import CONFIGS, tiny


def example(rows: int = 2, tokens: int = 9) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 512, (rows, tokens))
    labels = ids.clone()
    labels[0, :4] = -100
    labels[-1, -2] = -100
    return ids, labels


def naive(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """log-probability and entropy (B, T) of the next token from logits, 0 where the label is ignored."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    log_prob = log_p.gather(-1, shifted.clamp(min=0)[..., None])[..., 0]
    return log_prob * (shifted != -100), -(log_p.exp() * log_p).sum(-1) * (shifted != -100)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=2e-4, atol=2e-6 + 2e-5 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", CONFIGS)
def test_statistics_loss_and_gradients_are_those_of_the_model(name: str, tied: bool) -> None:
    model, (ids, labels) = tiny(name, tie_word_embeddings=tied), example()
    stock = model(ids, labels=labels)
    log_prob, entropy = naive(stock.logits, labels)
    expected_grads = gradients(model, stock.loss)
    log_prob_again, entropy_again = naive(model(ids).logits, labels)
    expected_stats_grads = gradients(model, (log_prob_again + 0.3 * entropy_again).sum())

    assert install(model) is model
    out = model(ids, labels=labels)
    assert out.logits is None and "logits" not in out
    assert out.log_probs.dtype == out.entropy.dtype == torch.float32
    torch.testing.assert_close(out.log_probs.double(), log_prob, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.loss, stock.loss)
    assert torch.all(out.log_probs[:, -1] == 0) and torch.all(out.entropy[:, -1] == 0)
    assert_same_gradients(gradients(model, out.loss), expected_grads)
    again = model(ids, labels=labels)
    assert_same_gradients(gradients(model, (again.log_probs + 0.3 * again.entropy).sum()), expected_stats_grads)


def test_a_head_with_bias() -> None:
    model, (ids, labels) = tiny("llama"), example()
    model.lm_head.bias = nn.Parameter(torch.randn(512))
    stock = model(ids, labels=labels)
    expected = gradients(model, stock.loss)
    out = install(model)(ids, labels=labels)
    torch.testing.assert_close(out.loss, stock.loss)
    assert_same_gradients(gradients(model, out.loss), expected)


def test_temperature_and_statistics_are_chosen_by_the_caller() -> None:
    model, (ids, labels) = tiny("qwen3"), example()
    per_sequence = torch.tensor([[0.7], [1.3]])
    log_prob, entropy = naive(model(ids).logits, labels, per_sequence[..., None])
    out = install(model)(ids, labels=labels, temperature=per_sequence, stats=("entropy", "sum_pi_squared", "logsumexp"))
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    assert out.log_probs is None and out.sum_pi_squared.shape == out.logsumexp.shape == labels.shape
    count = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(out.loss.double(), -log_prob.sum() / count, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extra", [{"num_items_in_batch": torch.tensor(37)}, {"num_items_in_batch": 5}])
def test_the_loss_takes_what_hugging_face_passes_it(extra: dict[str, Any]) -> None:
    model, (ids, labels) = tiny("llama"), example()
    expected = model(ids, labels=labels, **extra).loss
    torch.testing.assert_close(install(model)(ids, labels=labels, **extra).loss, expected)


def test_shift_labels_are_taken_as_they_are() -> None:
    model, (ids, labels) = tiny("llama"), example()
    own = labels.roll(2, dims=1)
    expected = model(ids, labels=labels, shift_labels=own).loss
    out = install(model)(ids, labels=labels, shift_labels=own)
    torch.testing.assert_close(out.loss, expected)
    assert torch.equal(out.log_probs != 0, own != -100)


def test_masks_positions_embeddings_caches_and_hidden_states_are_the_models_own() -> None:
    model, (ids, labels) = tiny("qwen2", attn_implementation="eager").eval(), example()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "labels": labels}
    wanted = {"output_hidden_states": True, "output_attentions": True, "use_cache": True}
    stock = model(inputs_embeds=model.get_input_embeddings()(ids), **inputs, **wanted)
    out = install(model)(inputs_embeds=model.get_input_embeddings()(ids), **inputs, **wanted)
    torch.testing.assert_close(out.loss, stock.loss)
    for got, expected in zip(out.hidden_states, stock.hidden_states, strict=True):
        assert torch.equal(got, expected)
    assert len(out.attentions) == len(stock.attentions) == 2
    assert out.past_key_values.get_seq_length() == ids.shape[1]
    stock_next = uninstall(model)(ids, labels=labels, past_key_values=stock.past_key_values)
    next_out = install(model)(ids, labels=labels, past_key_values=out.past_key_values)
    torch.testing.assert_close(next_out.loss, stock_next.loss)
    assert next_out.past_key_values.get_seq_length() == 2 * ids.shape[1]


def test_without_labels_nothing_has_changed() -> None:
    model, (ids, _) = tiny("gemma2").eval(), example()
    logits, last = model(ids).logits, model(ids, logits_to_keep=1).logits
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    install(model)
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model(ids, logits_to_keep=1).logits, last)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)


def test_a_tuple_for_those_who_ask_for_one() -> None:
    model, (ids, labels) = tiny("llama"), example()
    loss, *_, log_probs, entropy = install(model)(ids, labels=labels, return_dict=False, use_cache=False)
    assert loss.shape == () and log_probs.shape == entropy.shape == labels.shape


def test_under_checkpointing_and_autocast() -> None:
    model, (ids, labels) = tiny("llama"), example()
    with torch.autocast("cpu", torch.bfloat16):
        stock = model(ids, labels=labels)
        plain = gradients(model, stock.loss)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        out = install(model)(ids, labels=labels)
    assert out.log_probs.dtype == torch.float32
    torch.testing.assert_close(out.loss, stock.loss, rtol=2e-2, atol=2e-2)
    for name, grad in gradients(model, out.loss).items():
        assert grad.dtype == torch.float32
        assert float((grad - plain[name]).norm() / plain[name].norm()) < 0.05, name


def test_the_logits_are_never_made() -> None:
    model, ids = tiny("llama", vocab_size=65536), torch.randint(3, 512, (1, 64))
    install(model)
    with TensorMemory() as memory:
        loss = model(ids, labels=ids, use_cache=False).loss
        assert memory.live < ids.numel() * 65536 // 4  # a sixteenth of the fp32 logits
    loss.backward()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_installed_too_and_its_own(copied: Any) -> None:
    model, (ids, labels) = install(tiny("llama")), example()
    expected = model(ids, labels=labels)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    got = twin(ids, labels=labels)
    assert torch.equal(got.log_probs, expected.log_probs)
    uninstall(twin)
    assert twin(ids, labels=labels).logits is not None and model(ids, labels=labels).logits is None


def test_saved_models_and_signatures_look_like_the_stock_ones(tmp_path: Any) -> None:
    model, (ids, labels) = tiny("llama"), example()
    stock = inspect.signature(model.forward)
    expected = model(ids, labels=labels).loss
    install(model)
    names = list(inspect.signature(model.forward).parameters)
    assert set(names) == {*stock.parameters, "temperature", "stats"} and names[-1] == "kwargs"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded(ids, labels=labels).loss, expected)


def test_the_trainer_trains_an_installed_model(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    ids, labels = example(rows=4)
    data = [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]
    weights = []
    for prepare in (lambda model: model, install):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(prepare(tiny("qwen3")), arguments, train_dataset=data)
        trainer.train()
        weights.append(trainer.model.lm_head.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


def test_uninstall_gives_the_stock_model_back() -> None:
    model, (ids, labels) = tiny("llama"), example()
    before = dict(vars(model))
    expected = model(ids, labels=labels)
    assert uninstall(install(model)) is model
    assert vars(model).keys() == before.keys()
    assert torch.equal(model(ids, labels=labels).logits, expected.logits)


class ChangedLlama(LlamaForCausalLM):
    """Turns its hidden states into logits by `change`, of which no config speaks."""

    change: Any

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.change(self.model(input_ids, **kwargs).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda self, hidden: self.lm_head(hidden) * 1.1, "changes its logits"),
        (lambda self, hidden: self.lm_head(hidden) + 1.0, "changes its logits"),
        (lambda self, hidden: 30 * torch.tanh(self.lm_head(hidden) / 30), "changes its logits"),
        (lambda self, hidden: self.lm_head(hidden)[..., :500], "changes its logits"),
        (lambda self, hidden: self.lm_head(hidden[:, 1:]), "from one product of its head with every hidden state"),
        (lambda self, hidden: self.lm_head(hidden) + self.lm_head(hidden), "from one product of its head"),
        (lambda self, hidden: hidden @ self.lm_head.weight.T, "from one product of its head"),
    ],
    ids=["scaled", "shifted", "capped", "cut", "fewer tokens", "two products", "head not called"],
)
def test_unknown_treatment_of_logits_is_refused(change: Any, complaint: str) -> None:
    model = tiny("llama")
    model.__class__ = ChangedLlama
    ChangedLlama.change = change
    model.model.layers[0].eval()
    with pytest.raises(ValueError, match=complaint):
        install(model)
    assert model.training and not model.model.layers[0].training
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    assert "_loss_function" not in vars(model)
    ChangedLlama.change = lambda self, hidden: self.lm_head(hidden)
    install(model)


def test_another_loss_is_refused() -> None:
    model = tiny("llama")
    model.loss_function = nn.functional.cross_entropy
    with pytest.raises(ValueError, match="expected Hugging Face's causal LM loss"):
        install(model)


def test_bad_input_is_named() -> None:
    model, (ids, labels) = install(tiny("llama")), example()
    with pytest.raises(ValueError, match="has the flat head already"):
        install(model)
    with pytest.raises(ValueError, match=r"labels.shape: expected \(2, 9\) as the input, got \(2, 8\)"):
        model(ids, labels=labels[:, 1:])
    with pytest.raises(ValueError, match="labels: expected when temperature"):
        model(ids, temperature=0.5)
    with pytest.raises(ValueError, match="labels: expected when temperature"):
        model(ids, stats=("entropy",))
    calls: list[dict[str, Any]] = [{"stats": ()}, {"stats": 1}, {"labels": [[1] * 9] * 2}, {"temperature": -1.0}]
    before = model.model.forward
    model.model.forward = lambda *_, **__: pytest.fail("the body ran before the arguments were checked")
    for call in calls:
        with pytest.raises(ValueError, match=f"{next(iter(call))}: expected"):
            model(ids, **{"labels": ids, **call})
    model.model.forward = before
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids, labels=labels, logits_to_keep=1)
    with pytest.raises(ValueError, match="temperature: expected a positive"):
        model(ids, labels=labels, temperature=0.0)
    with pytest.raises(ValueError, match="stats"):
        model(ids, labels=labels, stats=("perplexity",))
    with pytest.raises(ValueError, match="expected a model that install"):
        uninstall(uninstall(model))


def test_what_is_no_causal_lm_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a Hugging Face causal LM, got Linear"):
        install(nn.Linear(3, 4))
    small = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 64}
    with pytest.raises(ValueError, match="expected a causal LM"):
        install(T5ForConditionalGeneration(T5Config(**small)))
    with pytest.raises(ValueError, match="expected a causal LM"):
        install(tiny("llama").model)
    adapted = tiny("llama")
    adapted.lm_head = nn.Sequential(adapted.lm_head)
    with pytest.raises(ValueError, match=r"expected a plain nn.Linear as the head of LlamaForCausalLM, got Sequential"):
        install(adapted)
