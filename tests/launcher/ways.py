"""Starting a job with tracing on, and what its tree says with times taken out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.tree.jobs import read_valid

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone"]
"""With any free port, as newer ones take unasked: that of torch 2.8 takes 29500 for every job."""
RANKSCOPE = str(BIN / "rankscope")
STEPS = "0-1"
TIMES = re.compile(r"(^time|_us|_ns)$")

installed = pytest.mark.skipif(
    not entry_points(group="torchrun.logs_specs").select(name="rankscope"),
    reason="needs the start-up file and the entry point: an environment made by launcher/test",
)


def start(
    command: Sequence[str | Path], out: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its good end, in the folder of the examples."""
    return _done(subprocess.run, command, out, variables)


def start_forked(
    command: Sequence[str | Path], out: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The same, where how its processes are started is not what is tested."""
    return _done(forked.run, command, out, variables)


def _done(
    run: Callable[..., subprocess.CompletedProcess[str]],
    command: Sequence[str | Path],
    out: Path,
    variables: Mapping[str, str],
) -> subprocess.CompletedProcess[str]:
    done = run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=EXAMPLES,
        env={**os.environ, "RANKSCOPE_OUT": str(out), "RANKSCOPE_STEPS": STEPS, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done


def document_of(out: Path) -> Any:
    """Return the tree of a finished, complete trace."""
    document = read_valid(out)
    assert document["completeness"]["complete"] is True, document["completeness"]
    return document


def steps_of(out: Path) -> Any:
    """Return setup and steps of a finished trace, times taken out."""
    document = document_of(out)
    return without_times([document["setup"], document["steps"]])


def without_times(value: Any) -> Any:
    """Return a tree without what differs from run to run."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not TIMES.search(k)}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value
