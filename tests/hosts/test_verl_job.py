"""A whole job of verl with Flathead in it, started as a user starts it: by one environment variable."""

from pathlib import Path

import pytest

from tests.support.jobs import tiny_chat_model
from tests.support.verl_job import give_chat_template, losses, write_subtractions

pytestmark = pytest.mark.slow


def test_ray_job_has_the_loss_curve_of_stock_verl(tmp_path: Path) -> None:
    """Flathead in the Ray worker, which imports verl itself; stock verl in one process."""
    model, data, calls = tiny_chat_model(tmp_path / "model"), tmp_path / "train.parquet", tmp_path / "calls"
    give_chat_template(model)
    write_subtractions(data)
    stock = losses(model, data, ray=False, flathead=False, calls=calls)
    assert not calls.exists()
    got = losses(model, data, ray=True, flathead=True, calls=calls)
    assert len(stock) == 4 and stock[-1] < stock[0] - 0.5  # it learns
    assert got == pytest.approx(stock, rel=1e-4)
    assert calls.read_text().splitlines() == ["log_prob"] * 4
