"""Opening traces: finished, unfinished, damaged, too new."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rankscope.errors import FolderError, SelectionError, TraceError, TraceVersionError
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.stepcolumns import COLUMNS
from rankscope.run.folders import (
    COLLECTOR_LOCK_NAME,
    FolderLock,
)
from rankscope.tree.build import build
from rankscope.tree.reader import newest_trace, open_trace
from rankscope.tree.selection import default_phase
from tests.tree.jobs import GRID, WEIGHT, grid_job, piece
from tests.tree.ranks_on_paper import PaperRank, digest


@pytest.fixture
def out(tmp_path):
    out = tmp_path / "trace"
    grid_job(tmp_path / "spools", out, steps=2)
    build(out, keep_spool=True)
    return out


def test_steps_and_nodes_are_read_with_their_types(out):
    trace = open_trace(out)
    assert [(s.mode, s.step) for s in trace.steps] == [(Mode.TRAIN, 0), (Mode.TRAIN, 1)]
    node = trace.steps[1].nodes[0].children[0]
    assert (node.path, node.raw_path, node.phase) == ("fc", "_orig_mod.fc", Phase.FORWARD)
    assert (node.class_name, node.ranks, node.key.step) == ("Linear", (0, 1, 2, 3), 1)
    assert node.time.slowest in node.ranks
    assert trace.is_complete


def test_nodes_are_found_by_glob_phase_and_step(out):
    trace = open_trace(out)
    assert {n.phase for n in trace.find("f*")} == {Phase.SETUP, Phase.FORWARD, Phase.BACKWARD}
    assert len(trace.find("**", phase="backward", step=1)) == 2
    assert trace.find("", phase=Phase.GRADS) == []


def test_a_glob_that_matches_nothing_lists_what_is_near(out):
    with pytest.raises(SelectionError, match=r"'fcc' matches nothing.*fc"):
        open_trace(out).find("fcc")


def test_a_value_gives_every_rank_its_numbers(out):
    value = open_trace(out).value("fc", "output", step=1)
    assert sorted(value.per_rank) == [0, 1, 2, 3]
    wanted = digest(piece(1, WEIGHT * 2, GRID, ["Replicate()", "Shard(1)"]), (((0, 4),), ((3, 6),)))
    assert value.per_rank[3].hash == wanted["hash"]
    assert value.per_rank[3].sketch == wanted["sketch"]


def test_a_value_of_setup_needs_no_step(out):
    value = open_trace(out).value("fc", "param:weight", phase="setup")
    assert value.combined.count == 24
    assert value.views[0].folds[0].requires_grad


def test_a_value_that_is_whole_everywhere_is_its_own_combination(tmp_path):
    out = tmp_path / "trace"
    for number in range(4):
        rank = PaperRank(tmp_path / "spools", number, 4)
        with rank.call() as call:
            rank.value(
                call,
                "output",
                WEIGHT,
                mesh=GRID,
                placements=["Replicate()"] * 2,
                whole=WEIGHT.shape,
            )
        rank.end()
        rank.ship(out)
    build(out)
    value = open_trace(out).value("", "output")
    assert value.combined.l2 == value.per_rank[0].l2
    assert value.combined.ranks == (0, 1, 2, 3)


def test_what_is_not_there_is_refused_with_what_is(out):
    trace = open_trace(out)
    with pytest.raises(SelectionError, match=r"slot of fc 'outptu' matches nothing.*output"):
        trace.value("fc", "outptu")
    with pytest.raises(SelectionError, match="no forward call in train step 7"):
        trace.value("fc", "output", step=7)
    with pytest.raises(SelectionError, match="no phase is called 'bakward'"):
        trace.value("fc", "output", phase="bakward")


def test_the_slot_decides_the_phase_where_none_is_named(out):
    trace = open_trace(out)
    for slot, phase in (
        ("output", "forward"),
        ("returned", "forward"),
        ("grad_output.0", "backward"),
        ("grad_input.1", "backward"),
        ("grad:weight", "grads"),
        ("param:weight", "params"),
        ("buffer:mask", "params"),
    ):
        assert default_phase(slot).word == phase
    named = trace.value("fc", "grad_output.0", phase="backward")
    assert trace.value("fc", "grad_output.0").views == named.views


def test_a_slot_of_another_phase_is_refused_with_that_phase(out):
    trace = open_trace(out)
    with pytest.raises(SelectionError, match=r"no param:weight in phase params.*phase='setup'"):
        trace.value("fc", "param:weight")
    with pytest.raises(SelectionError, match=r"no output in phase backward.*phase='forward'"):
        trace.value("fc", "output", phase="backward")


def test_samples_are_read_by_rank(out):
    samples = open_trace(out).value("", "input.0").samples
    assert sorted(samples) == [0, 1, 2, 3]
    assert np.array(samples[2].rows).shape == (2, 8)
    assert samples[2].rows[0][0] == WEIGHT[0, 0] + 1


def test_undefined_statistics_read_back_as_nan(tmp_path):
    rank, out = PaperRank(tmp_path / "spools"), tmp_path / "trace"
    with rank.call() as call:
        rank.value(call, "output", np.array([np.nan], np.float32))
    rank.end()
    rank.ship(out)
    build(out)
    found = open_trace(out).value("", "output").per_rank[0]
    assert (found.nan, found.l2) == (1, 0.0)
    assert all(math.isnan(number) for number in (found.mean, found.std, found.min))


def test_records_of_a_job_that_still_runs_are_read_and_called_incomplete(tmp_path):
    rank, out = PaperRank(tmp_path / "spools"), tmp_path / "trace"
    with rank.call() as call:
        rank.value(call, "output", WEIGHT)
        rank.ship(out, marker=False)
    lock = FolderLock(out / COLLECTOR_LOCK_NAME, "collector")
    trace = open_trace(out)
    assert trace.is_live
    lock.release()
    assert not trace.is_complete
    assert not open_trace(out).is_live  # nobody is left who would write it
    assert trace.completeness["ranks"][0]["end"] == "running"
    assert trace.find("")[0].status == "unfinished"
    assert trace.value("", "output").per_rank[0].count == 24


def test_a_newer_format_is_refused_with_the_version_it_needs(out):
    data = json.loads((out / "trace.json").read_text())
    data["format"] = "rankscope.trace/9"
    data["run"]["versions"]["rankscope"] = "7.1"
    (out / "trace.json").write_text(json.dumps(data))
    with pytest.raises(
        TraceVersionError, match=r"rankscope.trace/9.*install rankscope 7.1 or newer"
    ):
        open_trace(out)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', '{"format": "rankscope.trace/1"}']
)
def test_a_damaged_trace_is_one_clear_error(out, text):
    (out / "trace.json").write_text(text)
    with pytest.raises(TraceError, match=r"trace\.json"):
        open_trace(out)


def read_everything(trace):
    for node in trace.walk():
        _ = node.key, node.ranks, node.time
        for slot in node.slots:
            _ = slot.global_shape, slot.folds, slot.per_rank()


@pytest.mark.parametrize("name", COLUMNS)
def test_a_step_file_without_a_column_is_one_clear_error(out, name):
    (file,) = (out / "steps").iterdir()
    columns = load_file(file)
    save_file({key: each for key, each in columns.items() if key != name}, file)
    trace = open_trace(out)
    with pytest.raises(
        TraceError, match=r"steps/\d{6}\.safetensors: .*the (trace|file) is damaged"
    ):
        read_everything(trace)


@pytest.mark.parametrize("name", [*(c.name for c in COLUMNS.values() if c.is_text), "nodes.parent"])
def test_rows_that_name_what_is_not_there_are_one_clear_error(out, name):
    """Whatever they name, nothing is read beyond the file, and no tree becomes a ring."""
    (file,) = (out / "steps").iterdir()
    columns = load_file(file)
    if not len(columns[name]):
        return
    columns[name][-1] = 10**6
    save_file(columns, file)
    trace = open_trace(out)
    with pytest.raises(TraceError, match=r"steps/\d{6}\.safetensors: .*the trace is damaged"):
        read_everything(trace)


@pytest.mark.parametrize("cut", [0, 5, 200, 4000])
def test_damaged_columns_are_one_clear_error(out, cut):
    (path,) = (out / "steps").iterdir()
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceError, match=r"steps/\d{6}\.safetensors"):
        _ = open_trace(out).columns()["values.rank"]


def test_folders_that_are_no_traces_say_what_they_are(tmp_path):
    with pytest.raises(FolderError, match="no such folder"):
        open_trace(tmp_path / "absent")
    with pytest.raises(FolderError, match="is empty"):
        open_trace(tmp_path)
    (tmp_path / "x").write_text("")
    with pytest.raises(FolderError, match="x: is a file"):
        open_trace(tmp_path / "x")
    with pytest.raises(TraceError, match="not a trace"):
        open_trace(tmp_path)


def test_the_newest_trace_of_a_folder_is_the_default(tmp_path, out, monkeypatch):
    for name in ("rankscope-1", "rankscope-2"):
        (tmp_path / name / "spool").mkdir(parents=True)
        os.utime(tmp_path / name, (0, int(name[-1])))
    (tmp_path / "rankscope-3").mkdir()  # holds nothing
    os.utime(out, (0, 0))
    assert newest_trace(tmp_path).name == "rankscope-2"
    monkeypatch.chdir(tmp_path / "rankscope-3")
    with pytest.raises(FolderError, match="holds no trace"):
        open_trace()
    os.utime(out, (0, 3))
    assert newest_trace(tmp_path) == out, "whatever it is called"
    monkeypatch.chdir(out)
    assert open_trace().path == out
    assert open_trace(out / "trace.json").path == out
