"""What a single traced process starts, and what an untraced launcher starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope import open_trace
from tests.launcher.test_children import JOB
from tests.launcher.ways import document_of, installed, start_forked
from tests.torches import of_program

pytestmark = [installed, pytest.mark.launch, pytest.mark.xdist_group("children")]


def test_children_of_one_traced_process_are_not_traced_and_a_job_below_it_says_so(tmp_path: Path):
    """A job that it starts is a run of its own, in a folder beside that of this one."""
    out = tmp_path / "trace"
    done = start_forked([sys.executable, JOB, "few"], out, RANKSCOPE="1")
    assert of_program(done.stdout) == "trained 0\n"
    assert [rank["rank"] for rank in document_of(out)["completeness"]["ranks"]] == [0]
    assert [step.step for step in open_trace(out).steps] == [0, 1]
    said = [line for line in done.stderr.splitlines() if "rankscope:" in line]
    assert len(said) == 4, said
    assert f"{out} is not empty: tracing into {out}-2" in said[1]


def test_a_program_that_an_untraced_launcher_starts_is_traced(tmp_path: Path):
    """A launcher of somebody's own imports torch, calls no module, and starts the training."""
    program = "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()"
    launcher = f"import subprocess, sys, torch; subprocess.run([sys.executable, '-c', {program!r}])"
    done = subprocess.run(
        [sys.executable, "-c", launcher],
        env={**os.environ, "RANKSCOPE": "1", "RANKSCOPE_OUT": str(tmp_path / "trace")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert document_of(tmp_path / "trace")["run"]["world_size"] == 1
