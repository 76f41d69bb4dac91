"""`rankscope doctor --script`: a trace that changes the run, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.cli.test_doctor_script import doctor, statuses
from tests.launcher.ways import RANKSCOPE, installed
from tests.waiting import wait_until

pytestmark = [installed, pytest.mark.launch]


def test_a_trace_that_changes_the_run_is_what_is_blamed(tmp_path: Path):
    """The one setting that changes what a program computes, by a rounding."""
    code, found = doctor(
        tmp_path, "--script-steps", "1", "--script", "train.py", RANKSCOPE_PERTURB="1"
    )
    assert code == 1
    assert statuses(found) == {"script": "ok", "repeatable": "ok", "traced": "failed"}
    assert "not the same with tracing on: the loss of step 0" in found["traced"]["found"]


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time, torch\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    asked = forked.Popen(
        [RANKSCOPE, "doctor", "--script", "train.py"],
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        asked.terminate()
        assert asked.wait(60) == 128 + signal.SIGTERM
        script = Path("/proc") / (tmp_path / "pid").read_text()
        assert wait_until(lambda: not script.exists())
        assert not list(tmp_path.glob("rankscope-doctor-*"))
    finally:
        if asked.poll() is None:
            asked.kill()


def test_a_script_that_fails_is_shown_with_its_own_words(tmp_path: Path):
    code, found = doctor(tmp_path, "--script-steps", "9", "--script", "train.py", "--fail")
    assert code == 1
    assert statuses(found) == {"script": "failed", "repeatable": "skipped", "traced": "skipped"}
    assert "ValueError: the script's own" in found["script"]["found"]


def test_without_such_a_file_the_question_is_not_understood(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "doctor", "--script", "nothing.py"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "nothing.py: no such file" in done.stderr


def test_a_script_that_is_not_the_same_twice_is_told_so_and_rankscope_is_not_asked(tmp_path: Path):
    code, found = doctor(tmp_path, "--script", "train.py", "--by-the-clock")
    assert code == 1
    assert statuses(found) == {"script": "ok", "repeatable": "failed", "traced": "skipped"}
    assert "not deterministic by itself" in found["repeatable"]["found"]
    assert "the loss of step 0, backward 0" in found["repeatable"]["found"]
