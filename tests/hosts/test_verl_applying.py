"""Flathead put into verl and taken out again, and what is refused."""

import importlib.metadata
import importlib.util
import os

import pytest

from tests.support.verl_engine import environment

os.environ.update(environment(flathead=False))  # before verl is imported, here and nowhere else

from flathead.integrations import verl as flathead_in_verl

if flathead_in_verl.replaced():  # importing it the first time applied it; each test says what it wants
    flathead_in_verl.remove()


def test_stock_functions_come_back(caplog: pytest.LogCaptureFixture) -> None:
    """And the log has said, where verl shows it, that they were replaced."""
    from verl.utils import torch_functional
    from verl.workers.engine.fsdp import transformer_impl

    stock = torch_functional.entropy_from_logits, transformer_impl.logprobs_from_logits
    flathead_in_verl.apply()
    replaced = flathead_in_verl.replaced()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"flathead: in verl 0.9.1, in the place of {len(replaced)} of its names"
    ]
    assert torch_functional.entropy_from_logits is not stock[0]
    assert transformer_impl.logprobs_from_logits is not stock[1]
    flathead_in_verl.remove()
    assert (torch_functional.entropy_from_logits, transformer_impl.logprobs_from_logits) == stock
    assert flathead_in_verl.replaced() == []
    named = {name.rpartition(".")[2] for name, _ in replaced}
    assert {"entropy_from_logits", "_lm_head_logits_processor", "vocab_parallel_entropy", "forward_step"} <= named


def test_applied_twice() -> None:
    flathead_in_verl.apply()
    try:
        with pytest.raises(RuntimeError, match=r"verl\.apply: expected stock verl, got one replaced already"):
            flathead_in_verl.apply()
    finally:
        flathead_in_verl.remove()
    with pytest.raises(RuntimeError, match=r"verl\.remove: expected verl with Flathead in it, got stock"):
        flathead_in_verl.remove()


def test_moved_name_and_changed_signature_leave_verl_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are named in one message, and nothing is half replaced."""
    from verl.utils import torch_functional

    stock = torch_functional.logprobs_from_logits
    monkeypatch.delattr(torch_functional, "entropy_from_logits")
    monkeypatch.setattr(torch_functional, "logprobs_from_logits_v2", lambda logits, labels, temperature: None)
    with pytest.raises(RuntimeError) as raised:
        flathead_in_verl.apply()
    message = str(raised.value)
    assert "entropy_from_logits: expected (logits), got no such name" in message
    assert "logprobs_from_logits_v2: expected (logits, labels), got (logits, labels, temperature)" in message
    assert "verl 0.9.1 does not fit, nothing was replaced; pip install verl==0.9.1" in message
    assert torch_functional.logprobs_from_logits is stock
    assert flathead_in_verl.replaced() == []


def test_neighbouring_version_with_the_same_names_is_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.9.2")
    with pytest.warns(UserWarning, match=r"tested with verl 0\.9\.1; 0\.9\.2 has the same names"):
        flathead_in_verl.apply()
    flathead_in_verl.remove()


def test_too_late() -> None:
    """An engine that was built keeps what it took from verl."""
    from verl.workers.engine import FSDPEngineWithLMHead

    engine = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    with pytest.raises(RuntimeError, match=r"got a living FSDPEngineWithLMHead: nothing was replaced; import flathead"):
        flathead_in_verl.apply()
    del engine
    flathead_in_verl.apply()
    flathead_in_verl.remove()


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'flathead\[verl\]'"):
        flathead_in_verl.apply()


def test_sum_pi_squared_of_a_fused_head_that_does_not_make_it() -> None:
    """VeOmni's, for one: an error that says what to set, not a missing output."""
    from flathead.integrations.verl_engines import _left_by_fused_head

    with pytest.raises(
        NotImplementedError, match="calculate_sum_pi_squared: expected False with use_fused_kernels=True"
    ):
        _left_by_fused_head(object())
