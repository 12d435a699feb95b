"""The benchmark measures what it says: memory exactly, errors against float64, methods turn by turn."""

import json
import subprocess
import sys

import pytest
import torch

from flathead import bench

SMALL = bench.Case("logits", torch.float32, tokens=48, vocab=1031)  # an odd width: nothing lines up by accident
SMALL_HEAD = bench.Case("hidden", torch.float32, tokens=48, vocab=1031, hidden=40)


@pytest.mark.parametrize("source", bench.METHODS)
def test_every_method_agrees_with_float64(source: str) -> None:
    results = bench.measure(SMALL if source == "logits" else SMALL_HEAD, rounds=1)
    assert [result.method for result in results] == list(bench.METHODS[source])
    for result in results:
        assert result.value_error < 2e-5, result
        assert result.gradient_error < 2e-5, result
        assert result.seconds > 0
    assert results[0].time_ratio == 1.0


def test_a_wrong_method_shows_its_error() -> None:
    def off(logits_NV, labels_N):
        log_prob_N, entropy_N = bench.naive_logits(logits_NV, labels_N)
        return log_prob_N * 1.5, entropy_N + 0.25

    value, gradient = bench.errors(bench.Problem.of(SMALL), off, bench.naive_logits, slice(8))
    assert value > 0.25
    assert gradient > 0.01


def test_extra_bytes_are_the_peak_less_the_gradients() -> None:
    problem = bench.Problem.of(SMALL)

    def lavish(logits_NV, labels_N):
        kept = torch.empty(30_000, dtype=torch.uint8)
        torch.empty(70_000, dtype=torch.uint8)  # freed at once, so never alive together with the next one
        torch.empty(50_000, dtype=torch.uint8)
        log_prob_N, entropy_N = bench.naive_logits(logits_NV, labels_N)
        return log_prob_N + kept[0], entropy_N

    def temporaries_only(logits_NV, labels_N):
        torch.empty(100_000_000, dtype=torch.uint8)
        return bench.naive_logits(logits_NV, labels_N)

    naive = bench.extra_bytes(problem, bench.naive_logits)
    per_matrix = SMALL.logits_bytes
    assert 3 * per_matrix < naive < 5 * per_matrix  # log p, p, their product, and the gradients of those
    assert 0 <= bench.extra_bytes(problem, lavish) - naive <= 31_000
    # 100 MB at the start, when nothing else is alive; the gradient of the inputs (1 matrix) is taken off.
    assert bench.extra_bytes(problem, temporaries_only) == 100_000_000 - per_matrix


def test_flathead_needs_a_fraction_of_the_naive_memory() -> None:
    case = bench.Case("logits", torch.float32, tokens=256, vocab=8192)
    naive, ours = bench.measure(case, rounds=1)
    assert (naive.method, ours.method) == ("naive", "flathead")
    assert naive.extra_over_logits > 3
    assert ours.extra_over_logits < 0.2


def test_methods_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def named(name: str) -> bench.Method:
        def method(logits_NV, labels_N):
            calls.append(name)
            return bench.naive_logits(logits_NV, labels_N)

        return method

    monkeypatch.setitem(bench.METHODS, "logits", {"a": named("a"), "b": named("b")})
    bench.measure(SMALL, rounds=3)
    assert calls[-6:] == ["a", "b"] * 3


ARGUMENTS = ["--tokens", "32", "--vocab", "512", "--hidden", "16", "--rounds", "1"]


def test_command_prints_a_table_and_writes_json(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "bench.json"
    assert bench.main([*ARGUMENTS, "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed
    assert "logits bfloat16, N=32, V=512" in printed
    assert "hidden bfloat16, N=32, H=16, V=512" in printed
    saved = json.loads(report.read_text())
    assert saved["machine"]["torch"] == torch.__version__
    assert len(saved["results"]) == sum(len(bench.METHODS[case.source]) for case in bench.CASES.values())
    assert {"case", "method", "seconds", "extra_bytes", "value_error"} <= saved["results"][0].keys()


def test_without_rich_the_same_numbers_come_as_text() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        f"from flathead import bench; bench.main({[*ARGUMENTS, '--case', 'logits-fp32']!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[1] == "logits float32, N=32, V=512"
    assert lines[2].split("  ")[-1].strip() == "grad err"
    assert [line.split()[0] for line in lines[3:]] == list(bench.METHODS["logits"])
    assert done.stderr == ""  # the profiler's own chatter is not the user's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--rounds", "-1"], "--rounds: expected at least 1, got -1"),
        (["--case", "logits-fp8"], "logits-fp8"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
