"""The start-up file: silent without RANKSCOPE, armed after torch with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PTH = Path(__file__).parents[2] / "launcher/rankscope_launcher/rankscope.pth"
WAITING = "\nimport sys; print(sum('_AfterTorch' in repr(f) for f in sys.meta_path))"
"""Code that prints how many of our finders are in place."""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has just executed the start-up line, as site does."""
    start = PTH.read_text()
    return subprocess.run(
        [sys.executable, "-c", start + code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_start_up_file_is_one_line_that_site_executes():
    assert len(PTH.read_text().splitlines()) == 1
    assert PTH.read_text().startswith("import ")


@pytest.mark.parametrize("value", ["", "0", "false", "NO", "off"])
def test_without_the_variable_nothing_of_ours_is_imported(value: str):
    done = run(
        "import sys; print([m for m in sys.modules if 'rankscope' in m])" + WAITING, RANKSCOPE=value
    )
    assert done.stdout == "[]\n0\n"
    assert done.stderr == ""


def test_with_the_variable_torch_is_not_imported_but_waited_for():
    done = run(
        "import sys; print('torch' in sys.modules, type(sys.meta_path[0]).__name__,"
        " [m for m in sys.modules if m.startswith('rankscope.')])",
        RANKSCOPE="1",
    )
    assert done.stdout == "False _AfterTorch []\n"
    assert done.stderr == ""


def test_two_start_up_files_wait_for_torch_once():
    done = run(PTH.read_text() + WAITING, RANKSCOPE="1")
    assert done.stdout == "1\n"


def test_looking_for_torch_does_not_use_the_hook_up():
    done = run(
        "import importlib.util as u, sys\n"
        "spec = u.find_spec('torch'); print(spec.loader.get_filename('torch') == spec.origin)\n"
        "import torch\n"
        "from rankscope.agent import arming\n"
        "print(arming.current_session() is not None)\n"
        "print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)" + WAITING,
        RANKSCOPE="1",
    )
    assert done.stdout == "True\nTrue\nSourceFileLoader SourceFileLoader\n0\n", done.stderr
    assert done.stderr == ""


def test_a_torch_that_cannot_be_imported_fails_as_it_would_without_us(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')")
    done = run("import torch", RANKSCOPE="1", PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}")
    assert done.returncode == 1
    assert "broken on purpose" in done.stderr
    assert "rankscope:" not in done.stderr


def test_what_goes_wrong_while_arming_is_one_warning_and_the_program_runs(tmp_path: Path):
    (tmp_path / "torch.py").write_text("")  # no torch at all: the agent cannot be imported
    done = run(
        "import torch; print('trained')",
        RANKSCOPE="1",
        PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}",
    )
    assert done.stdout == "trained\n"
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("rankscope: process ")
    assert "untraced" in done.stderr


def test_a_program_without_torch_never_notices():
    done = run("import json, subprocess; print('done')", RANKSCOPE="1")
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_without_the_variable_the_start_up_file_costs_less_than_a_millisecond():
    from tests.perf.startup import measure

    plain_us, ours_us = measure(5)["site, us"]
    assert ours_us - plain_us < 1000
