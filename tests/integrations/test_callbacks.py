"""Callbacks in the frameworks' own loops: the same training, exact steps, a verdict at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rankscope import check, open_trace
from tests import forked
from tests.lab.launcher.test_frameworks import needs
from tests.launcher.ways import TORCHRUN, installed, start_forked

pytestmark = [installed, pytest.mark.launch, pytest.mark.xdist_group("frameworks")]

TRAINER = Path(__file__).with_name("trainer_job.py")
LIGHTNING = Path(__file__).with_name("lightning_job.py")
TWO = [*TORCHRUN, "--nproc-per-node", "2"]


def run(command: list[str | Path], out: Path, **given: str) -> subprocess.CompletedProcess[str]:
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    return start_forked(command, out, **{**quiet, **given})


def final(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line with the hashes of the final parameters and of the random state."""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("final ")]
    return line


def path_of(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("path ")]
    return line.removeprefix("path ")


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = [line for line in done.stderr.splitlines() if line.startswith("rankscope: ")]
    return [line.removeprefix("rankscope: ") for line in lines]


def steps(out: Path) -> dict[str, int]:
    trace = open_trace(out)
    assert trace.is_complete
    return dict(Counter(step.mode.name for step in trace.steps))


@needs("transformers")
@needs("accelerate")
def test_a_trainer_with_the_callback_trains_as_without_and_ends_with_the_verdict(tmp_path: Path):
    plain = run([sys.executable, TRAINER, "plain", tmp_path], tmp_path / "none")
    traced = run([sys.executable, TRAINER, "callback", tmp_path], tmp_path / "trace")
    assert final(traced) == final(plain)
    assert said(plain) == [] and not (tmp_path / "none").exists()
    assert said(traced)[-2].startswith(f"trace in {tmp_path / 'trace'}; read it: ")
    assert said(traced)[-1].startswith("no fault")
    assert path_of(traced) == str(tmp_path / "trace")
    assert steps(tmp_path / "trace") == {"TRAIN": 3, "EVAL": 4}
    first = next(step for step in open_trace(tmp_path / "trace").steps if step.mode.name == "TRAIN")
    forwards = [node for node in first.nodes if node.phase.name == "FORWARD"]
    assert [node.micro_batch for node in forwards] == [0, 1], "two micro-batches are accumulated"


@needs("transformers")
@needs("accelerate")
def test_a_fault_is_named_when_training_ends(tmp_path: Path):
    done = run([*TWO, TRAINER, "fault", tmp_path], tmp_path / "trace")
    verdict, first, where = said(done)[-3:]
    assert verdict.startswith("fault: replica-mismatch")
    assert first.startswith("first: ") and "model.layers.1.mlp.up_proj" in first
    assert where.startswith("where: model.layers.1.mlp.up_proj") and "step 1" in where


@needs("transformers")
@needs("accelerate")
def test_a_training_that_raises_leaves_a_trace_that_names_the_crash(tmp_path: Path):
    out = tmp_path / "trace"
    done = forked.run(
        [sys.executable, str(TRAINER), "raise", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RANKSCOPE_OUT": str(out)},
    )
    assert done.returncode == 1 and "ValueError: on purpose" in done.stderr
    report = check(open_trace(out))
    assert [finding.kind.value for finding in report.origins] == ["crash"]


@needs("lightning")
@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.lab)])
def test_lightning_with_the_callback_trains_as_without_and_ends_with_the_verdict(
    tmp_path: Path, devices: str
):
    plain = run([sys.executable, LIGHTNING, "plain", "plain", devices], tmp_path / "none")
    traced = run([sys.executable, LIGHTNING, "plain", "callback", devices], tmp_path / "trace")
    assert final(traced) == final(plain)
    assert path_of(traced) == str(tmp_path / "trace")
    assert [line for line in said(traced) if line.startswith("no fault")] == [said(traced)[-1]]
    assert steps(tmp_path / "trace") == {"TRAIN": 2, "EVAL": {"1": 3, "2": 2}[devices]}
    assert open_trace(tmp_path / "trace").run["world_size"] == int(devices)
