"""Flathead into TRL and out again: what it rebinds, what it says, and what it refuses with nothing replaced."""

import importlib
import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import trl.kernels
from trl.experimental.sdft import loss_utils, sdft_trainer
from trl.trainer import utils

import flathead.integrations.trl as flat
from flathead.integrations.replacing import parameters_of

if flat.replaced():
    flat.remove()  # importing applied it; each test says whether it wants it
NAMES = ["_ChunkedLogProbFunction", "_use_triton", "selective_log_softmax", "entropy_from_logits"]
NAMES += ["selective_log_softmax_and_entropy"]
HOLDERS = [(utils, name) for name in NAMES]
HOLDERS += [(trl.kernels, "ChunkedLogProbFunction"), (trl.kernels.chunked_logprob, "ChunkedLogProbFunction")]
HOLDERS += [(loss_utils, "selective_log_softmax"), (sdft_trainer, "selective_log_softmax")]
STOCK = [getattr(module, name) for module, name in HOLDERS]


def replaced_holders() -> set[str]:
    now = [getattr(module, name, None) for module, name in HOLDERS]
    return {f"{h[0].__name__}.{h[1]}" for h, new, old in zip(HOLDERS, now, STOCK, strict=True) if new is not old}


@pytest.fixture(autouse=True)
def stock_before_and_after() -> Iterator[None]:
    assert not replaced_holders()
    yield
    if flat.replaced():
        flat.remove()
    assert not replaced_holders()


def test_everything_that_holds_the_stock_function_gets_the_new_one_and_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flathead")
    flat.apply()
    assert replaced_holders() == {f"{module.__name__}.{name}" for module, name in HOLDERS}
    assert loss_utils.selective_log_softmax is utils.selective_log_softmax is flat.selective_log_softmax
    for module, name in HOLDERS[2:]:
        assert getattr(module, name).__module__ == "flathead.integrations.trl"
    assert [path for path, _ in flat.replaced()] == [f"trl.trainer.utils.{name}" for name in NAMES]
    assert flat.replaced()[0][1] == "flathead.integrations.trl.HeadLogProbs"
    (record,) = caplog.records
    assert record.levelno == logging.INFO and f"TRL {importlib.metadata.version('trl')}: replaced" in record.message
    assert all(f"{path} -> {new}" in record.message for path, new in flat.replaced())
    flat.remove()
    assert flat.replaced() == [] and not replaced_holders()


def test_what_decides_on_triton_elsewhere_is_left_alone() -> None:
    from trl.kernels import chunked_logprob
    from trl.trainer import distillation_trainer

    flat.apply()
    assert distillation_trainer._use_triton is chunked_logprob._use_triton is not utils._use_triton


def test_the_new_functions_take_what_the_stock_ones_take() -> None:
    for name, stock in zip(NAMES, STOCK, strict=False):
        new = {"_ChunkedLogProbFunction": flat.HeadLogProbs.apply, "_use_triton": flat.score_live_tokens_only}
        assert parameters_of(new.get(name) or getattr(flat, name)) == parameters_of(stock)


def test_a_module_imported_later_is_given_back_its_own_too() -> None:
    name = "trl.experimental.sdft.loss_utils"
    flat.apply()
    before = sys.modules.pop(name)
    try:
        later: Any = importlib.import_module(name)
        assert later.selective_log_softmax is flat.selective_log_softmax
        flat.remove()
        assert later.selective_log_softmax is utils.selective_log_softmax
        assert before.selective_log_softmax is flat.selective_log_softmax, "no longer among the modules: not ours"
    finally:
        sys.modules[name] = before
        vars(before)["selective_log_softmax"] = utils.selective_log_softmax


def test_twice_is_an_error_and_importing_again_is_not() -> None:
    flat.apply()
    with pytest.raises(RuntimeError, match=r"expected stock TRL, got one replaced already; call remove\(\)"):
        flat.apply()
    assert importlib.import_module("flathead.integrations.trl") is flat
    assert len(flat.replaced()) == len(NAMES)
    flat.remove()
    with pytest.raises(RuntimeError, match=r"trl\.remove: expected TRL with Flathead in it, got stock; call apply\(\)"):
        flat.remove()


def test_a_second_copy_of_the_module_sees_the_first() -> None:
    flat.apply()
    sys.modules.pop("flathead.integrations.trl")
    try:
        with pytest.raises(RuntimeError, match=r"selective_log_softmax: expected the stock one, got flathead.*already"):
            importlib.import_module("flathead.integrations.trl")
    finally:
        sys.modules["flathead.integrations.trl"] = flat


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_moved_is_named_and_nothing_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, name)
    with pytest.raises(RuntimeError) as caught:
        flat.apply()
    message = str(caught.value)
    assert f"TRL {importlib.metadata.version('trl')} does not fit, nothing was replaced" in message
    assert "pip install trl==1.16.0" in message
    assert f"trl.trainer.utils.{name}: expected (" in message and "got no such name" in message
    assert replaced_holders() == {f"trl.trainer.utils.{name}"}, "the one that is missing, and no more"
    monkeypatch.undo()


def test_a_module_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    with pytest.raises(RuntimeError, match=r"trl\.trainer\.utils\._use_triton: expected \(device\), got no such name"):
        flat.apply()
    monkeypatch.undo()


def test_another_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "entropy_from_logits", lambda logits, rows=128: None)
    with pytest.raises(RuntimeError, match=r"entropy_from_logits: expected \(logits, chunk_size\), got \(.*rows\)"):
        flat.apply()
    monkeypatch.undo()


def test_another_use_of_the_decision_on_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def somebody(device: Any) -> bool:
        return _use_triton(device)  # type: ignore[name-defined]  # noqa: F821

    somebody.__module__ = "trl.trainer.utils"
    monkeypatch.setattr(utils, "somebody", somebody, raising=False)
    with pytest.raises(RuntimeError, match=r"_use_triton: expected to be read by add_fused_lm_head alone, got \["):
        flat.apply()
    monkeypatch.undo()


def test_a_version_not_tested_warns_once_and_works_if_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.17.2" if name == "trl" else genuine(name))
    with pytest.warns(UserWarning, match=r"tested with TRL 1\.16\.0; 1\.17\.2 has the same names") as seen:
        flat.apply()
    assert len([one for one in seen if "tested with TRL" in str(one.message)]) == 1
    assert len(flat.replaced()) == len(NAMES)


def test_the_tested_version_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    flat.apply()
    assert not [one for one in recwarn if "tested with TRL" in str(one.message)]


def test_removing_what_others_replaced_since_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flat.apply()
    monkeypatch.setattr(utils, "entropy_from_logits", lambda logits: None)
    with pytest.raises(RuntimeError, match=r"expected Flathead's trl\.trainer.*entropy_from_logits, got another"):
        flat.remove()
    monkeypatch.undo()
    assert replaced_holders() == {f"{module.__name__}.{name}" for module, name in HOLDERS}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_without_trl_the_error_names_the_extra() -> None:
    done = run("import sys; sys.modules['trl'] = None; import flathead.integrations.trl")
    assert "ModuleNotFoundError: flathead.integrations.trl: expected TRL, which is not installed" in done.stderr
    assert "pip install 'flathead[trl]'" in done.stderr


def test_importing_the_package_of_integrations_imports_no_host() -> None:
    done = run(
        "import sys, flathead.integrations.replacing; print([m for m in ('trl', 'transformers') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]"


def test_after_a_trainer_was_built_it_is_too_late() -> None:
    from trl.trainer.base_trainer import _BaseTrainer

    trainer = _BaseTrainer.__new__(_BaseTrainer)  # alive is what counts
    with pytest.raises(RuntimeError, match=r"got a living _BaseTrainer: nothing was replaced; import .* before"):
        flat.apply()
    trainer.itself = trainer  # nobody holds it any more, but only the collector sees that
    del trainer
    flat.apply()
