"""Callbacks on two ranks, on rarer trainings, and where the callback cannot trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rankscope import open_trace
from tests.integrations.test_callbacks import (
    LIGHTNING,
    TRAINER,
    TWO,
    final,
    path_of,
    run,
    said,
    steps,
)
from tests.lab.launcher.test_frameworks import needs
from tests.launcher.ways import RANKSCOPE, installed

pytestmark = [installed, pytest.mark.launch, pytest.mark.xdist_group("frameworks")]


@needs("transformers")
@needs("accelerate")
def test_two_ranks_with_the_callback_train_as_without_and_one_of_them_says_the_verdict(
    tmp_path: Path,
):
    plain = run([*TWO, TRAINER, "plain", tmp_path], tmp_path / "none")
    traced = run([*TWO, TRAINER, "callback", tmp_path], tmp_path / "trace")
    assert final(traced) == final(plain)
    assert path_of(traced) == str(tmp_path / "trace")
    assert [line for line in said(traced) if line.startswith("no fault")] == [said(traced)[-1]]
    assert steps(tmp_path / "trace") == {"TRAIN": 3, "EVAL": 2}
    assert open_trace(tmp_path / "trace").run["world_size"] == 2


@needs("transformers")
@needs("accelerate")
def test_report_to_takes_the_name_once_it_is_registered(tmp_path: Path):
    traced = run([sys.executable, TRAINER, "name", tmp_path], tmp_path / "trace")
    assert said(traced)[-1].startswith("no fault found: ")
    assert open_trace(tmp_path / "trace").is_complete


@needs("transformers")
@needs("accelerate")
def test_the_callback_does_nothing_where_the_job_is_traced_already(tmp_path: Path):
    out = tmp_path / "trace"
    command = [RANKSCOPE, "run", "--rs-steps", "all", "--nproc-per-node", "2", TRAINER]
    done = run([*command, "callback", tmp_path], out)
    assert path_of(done) == "None"
    assert [line for line in said(done) if "trac" in line] == said(done)
    assert len([line for line in said(done) if line.startswith("trace in ")]) == 1
    assert steps(out) == {"TRAIN": 3, "EVAL": 2}


@needs("transformers")
@needs("accelerate")
def test_a_setting_that_is_none_is_said_and_the_training_goes_on(tmp_path: Path):
    plain = run([sys.executable, TRAINER, "plain", tmp_path], tmp_path / "none")
    done = run([sys.executable, TRAINER, "wrong", tmp_path], tmp_path / "trace")
    assert final(done) == final(plain)
    (line,) = said(done)
    assert line.startswith("not tracing: 'nothing' is not a setting")


@needs("pytorch_lightning")
def test_the_other_name_of_lightning_takes_the_same_callback(tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(LIGHTNING.read_text().replace("from lightning ", "from pytorch_lightning "))
    traced = run([sys.executable, script, "plain", "callback", "1"], tmp_path / "trace")
    assert said(traced)[-1].startswith("no fault found: ")
    assert steps(tmp_path / "trace") == {"TRAIN": 2, "EVAL": 3}


@needs("lightning")
def test_a_batch_in_which_two_optimizers_step_is_one_step(tmp_path: Path):
    """From outside, each optimizer step ends a step: the forward between them begins the next."""
    outside = run(
        [sys.executable, LIGHTNING, "gan", "plain", "1"],
        tmp_path / "outside",
        RANKSCOPE="1",
        RANKSCOPE_STEPS="all",
    )
    inside = run([sys.executable, LIGHTNING, "gan", "callback", "1"], tmp_path / "inside")
    assert final(inside) == final(outside)
    assert steps(tmp_path / "outside")["TRAIN"] == 8
    assert steps(tmp_path / "inside")["TRAIN"] == 4


@needs("lightning")
def test_lightning_trains_where_the_callback_cannot_trace(tmp_path: Path):
    plain = run([sys.executable, LIGHTNING, "plain", "plain", "1"], tmp_path / "none")
    done = run([sys.executable, LIGHTNING, "plain", "wrong", "1"], tmp_path / "trace")
    assert final(done) == final(plain)
    assert said(done) == [line for line in said(done) if line.startswith("not tracing: ")] != []
