"""Accelerate, Hugging Face Trainer and Lightning scripts, unmodified: same numbers, right steps."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from rankscope import Trace, open_trace
from tests.launcher.ways import BIN, RANKSCOPE, TORCHRUN, installed, start_forked

pytestmark = [installed, pytest.mark.launch, pytest.mark.xdist_group("frameworks")]

SCRIPTS = Path(__file__).parent / "frameworks"
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "RANKSCOPE_STEPS": "all"}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: pip install -e '.[frameworks]'",
    )


def final(command: list[str | Path], out: Path, **variables: str) -> str:
    """Run a script; return the line with the hash of its final parameters."""
    said = start_forked(command, out, **QUIET, **variables).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("final ")]
    return line


def counted(trace: Trace) -> dict[str, int]:
    assert trace.is_complete
    return dict(Counter(step.mode.name for step in trace.steps))


def paths(trace: Trace, mode: str) -> list[list[str]]:
    """Return the paths of each forward pass of the first step of a mode."""
    first = next(step for step in trace.steps if step.mode.name == mode)
    passes = [node for node in first.nodes if node.phase.name == "FORWARD"]
    return [[node.path for node in call.walk()] for call in passes]


@needs("accelerate")
def test_an_accelerate_script_has_one_step_per_optimizer_step_and_its_own_paths(tmp_path: Path):
    script, out = SCRIPTS / "accelerated.py", tmp_path / "trace"
    two = ["--nproc-per-node", "2", script]
    plain = final([*TORCHRUN, *two], tmp_path / "none")
    assert final([RANKSCOPE, "run", *two], out) == plain
    trace = open_trace(out)
    assert counted(trace) == {"TRAIN": 4, "EVAL": 2}
    assert paths(trace, "TRAIN") == [["", "first", "last"]] * 2, "DDP's wrapper is folded in"
    assert paths(trace, "EVAL") == [["", "first", "last"]]


@needs("accelerate")
def test_accelerate_launch_gives_the_tree_of_rankscope_run(tmp_path: Path):
    script = SCRIPTS / "accelerated.py"
    launch: list[str | Path] = [BIN / "accelerate", "launch", "--cpu", "--num_processes", "1"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", script]
    ours = final(launch, tmp_path / "a", RANKSCOPE="1")
    assert ours == final([RANKSCOPE, "run", script], tmp_path / "b")
    traces = open_trace(tmp_path / "a"), open_trace(tmp_path / "b")
    assert counted(traces[0]) == counted(traces[1]) == {"TRAIN": 4, "EVAL": 2}
    for mode in ("TRAIN", "EVAL"):
        assert paths(traces[0], mode) == paths(traces[1], mode)


@needs("transformers")
@needs("accelerate")
def test_the_trainer_has_one_step_per_optimizer_step_and_evaluates_apart(tmp_path: Path):
    script, out = SCRIPTS / "trainer.py", tmp_path / "trace"
    plain = final([sys.executable, script, tmp_path / "o"], tmp_path / "none")
    traced = final([sys.executable, script, tmp_path / "p"], out, RANKSCOPE="1")
    assert traced == plain
    trace = open_trace(out)
    assert counted(trace) == {"TRAIN": 3, "EVAL": 4}
    passes = paths(trace, "TRAIN")
    assert len(passes) == 2, "two micro-batches are accumulated"
    assert passes == paths(trace, "EVAL") * 2
    assert {"", "model", "model.layers.1.mlp.down_proj", "lm_head"} <= set(passes[0])


@needs("lightning")
def test_lightning_starts_its_second_rank_itself_and_both_are_in_one_tree(tmp_path: Path):
    """Under DDP Lightning calls the module with `training_step` in place of `forward`, and that
    calls the module: the root stands in itself.
    """
    script, out = SCRIPTS / "lit.py", tmp_path / "trace"
    plain = final([sys.executable, script, "2"], tmp_path / "none")
    assert final([sys.executable, script, "2"], out, RANKSCOPE="1") == plain
    trace = open_trace(out)
    assert trace.run["world_size"] == 2
    assert counted(trace) == {"TRAIN": 4, "EVAL": 3}
    inside = ["", "net", "net.0", "net.1", "net.2"]
    assert paths(trace, "TRAIN") == [["", *inside]] * 2
    assert paths(trace, "EVAL") == [["", *inside]]


@needs("lightning")
def test_lightning_on_one_device_runs_its_training_step_outside_the_module(tmp_path: Path):
    out = tmp_path / "trace"
    final([sys.executable, SCRIPTS / "lit.py", "1"], out, RANKSCOPE="1")
    trace = open_trace(out)
    assert counted(trace) == {"TRAIN": 4, "EVAL": 5}
    assert paths(trace, "TRAIN") == [["", "net", "net.0", "net.1", "net.2"]] * 2
