"""What all callbacks share, in a loop of our own: broken off, begun anew, traced already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope import open_trace
from tests.launcher.ways import installed

pytestmark = [installed, pytest.mark.launch]

PROGRAM = """
import sys
import torch
import rankscope
from rankscope.integrations.training import TracedTraining

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def train(training):
    training.begin()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        training.step()

first, second = TracedTraining({"out": "first"}), TracedTraining({"out": "second"})
"""


def run(program: str, folder: Path) -> list[str]:
    """Run a program behind `PROGRAM`; return what rankscope says."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("rankscope: ")]
    return [line.removeprefix("rankscope: ") for line in lines]


def test_a_training_that_was_broken_off_ends_where_the_next_one_begins(tmp_path: Path):
    said = run("train(first)\ntrain(second)\nsecond.end()\nassert first.path\n", tmp_path)
    assert "the training before did not come to its end: its trace ends here" in said
    assert [line.startswith("no fault found: ") for line in said].count(True) == 2
    for name in ("first", "second"):
        trace = open_trace(tmp_path / name)
        assert trace.is_complete and [step.step for step in trace.steps] == [0, 1]


@pytest.mark.lab
def test_a_callback_that_begins_again_goes_on_in_its_trace(tmp_path: Path):
    said = run("train(first)\ntrain(first)\nfirst.end()\nfirst.end()\n", tmp_path)
    assert [line.startswith("no fault found: ") for line in said].count(True) == 1
    assert [step.step for step in open_trace(tmp_path / "first").steps] == [0, 1, 2]


def test_a_block_around_the_training_keeps_its_trace(tmp_path: Path):
    block = "with rankscope.trace(model, out='block'):\n    train(first)\n    first.end()\n"
    said = run(block + "assert first.path is None\n", tmp_path)
    assert said == [] and not (tmp_path / "first").exists()
    assert [step.step for step in open_trace(tmp_path / "block").steps] == [0, 1]
