"""verl's own dispatcher of profilers with our tool, on two gloo ranks. Its trainer needs Ray and
GPUs, and is not run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from rankscope import open_trace
from tests.launcher.ways import TORCHRUN, installed

pytestmark = [
    installed,
    pytest.mark.launch,
    pytest.mark.skipif(
        importlib.util.find_spec("verl") is None,
        reason="verl is not installed: pip install --no-deps verl==0.9.1, then what it imports",
    ),
]

JOB = Path(__file__).with_name("verl_job.py")


def train(folder: Path, tool: str, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", str(JOB), tool, str(folder / "profiles")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def final(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("final ")]
    return line


def test_the_tool_traces_the_steps_that_are_profiled_and_no_other(tmp_path: Path):
    known = {"VERL_USE_EXTERNAL_MODULES": "rankscope.integrations.verl"}
    plain = train(tmp_path, "torch_memory")
    traced = train(tmp_path, "rankscope", **known)
    assert final(traced) == final(plain)
    out = tmp_path / "profiles/rankscope-actor-step2"
    said = [line for line in traced.stderr.splitlines() if line.startswith("rankscope: ")]
    assert said[0] == f"rankscope: tracing into {out}"
    assert said[-1].startswith("rankscope: no fault found: ")
    assert [path.name for path in out.parent.iterdir() if "rankscope" in path.name] == [out.name]
    trace = open_trace(out)
    assert trace.is_complete and trace.run["world_size"] == 2
    assert Counter(step.mode.name for step in trace.steps) == {"EVAL": 1, "TRAIN": 2}


def test_a_tool_whose_module_nobody_named_does_nothing(tmp_path: Path):
    traced = train(tmp_path, "rankscope")
    assert "rankscope" not in traced.stderr and not (tmp_path / "profiles").exists()
