"""Which backends a test run covered is said, and one that did not run is never taken for one that passed."""

import subprocess
import sys
from pathlib import Path

from tests.support.backends import BACKENDS, report, version

ROOT = Path(__file__).parent.parent


def test_what_did_not_run_is_named_and_fails() -> None:
    lines = ["fsdp: 3 of 3 tests passed with torch 2.13.0, torch 2.13.0", "veomni: 1 of 2 tests passed with veomni 1"]
    text, complete = report(lines, ["fsdp", "torchtitan", "veomni"])
    assert text.splitlines() == ["backends", f"  {lines[0]}", "  torchtitan: NOT RUN", f"  {lines[1]}"]
    assert not complete
    assert report(lines, ["fsdp", "veomni"])[1]
    assert not report([], ["fsdp"])[1]


def test_the_command_fails_unless_every_backend_ran(tmp_path: Path) -> None:
    def gathered(*names: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.support.backends", str(tmp_path / "summary"), *names]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert gathered("fsdp").returncode == 1  # no file: nothing ran
    (tmp_path / "summary").write_text("fsdp: 3 of 3 tests passed\n")
    assert gathered("fsdp").returncode == 0
    done = gathered("fsdp", "veomni")
    assert done.returncode == 1 and "veomni: NOT RUN" in done.stdout


def test_asking_for_a_backend_that_is_not_installed_is_an_error() -> None:
    missing = [name for name in BACKENDS if version(name) is None]
    assert missing, "no environment has all of them: their packages contradict one another"
    for name in missing:
        command = [sys.executable, "-m", "pytest", "--backend", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 4
        assert f"{BACKENDS[name][0]} is not installed; make test-{name} installs it" in done.stderr


def test_every_module_that_is_listed_exists() -> None:
    for _, modules in BACKENDS.values():
        assert modules and all((ROOT / "tests" / module).is_file() for module in modules)
