"""One JSON object a line, read back with nothing but a JSON parser."""

from __future__ import annotations

import json
import math

import pytest

from rankscope.errors import FolderError, SelectionError
from tests.export.conftest import exported, held_values

STATISTICS = ("min", "max", "mean", "std", "l2")
COUNTS = ("count", "nan", "posinf", "neginf", "zero")


def read(trace, out, **words):
    exported(trace, "jsonl", out, **words)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_line_is_one_value_of_one_rank_with_the_numbers_of_the_trace(trace, tmp_path):
    lines = read(trace, tmp_path / "out.jsonl")
    held = held_values(trace)
    assert len({tuple(line) for line in lines}) == 1, "every line has the same keys"
    found = {(line["node"], line["slot"], line["rank"]): line for line in lines}
    assert len(found) == len(lines)
    assert found.keys() == held.keys()
    for key, digest in held.items():
        line = found[key]
        assert line["digested"] == (digest is not None)
        if digest is None:
            assert all(line[name] is None for name in (*COUNTS, *STATISTICS, "hash", "sketch"))
            continue
        assert [line[name] for name in COUNTS] == [getattr(digest, name) for name in COUNTS]
        for name in STATISTICS:
            wanted = getattr(digest, name)
            assert line[name] is None if math.isnan(wanted) else float(line[name]) == wanted
        assert int(line["hash"], 16) == digest.hash
        assert tuple(map(float, line["sketch"])) == digest.sketch


def test_a_line_says_what_the_value_is_and_how_it_lies(traces, tmp_path):
    lines = read(traces["grid"], tmp_path / "out.jsonl", path="fc", step="1", rank="3")
    (line,) = [line for line in lines if line["slot"] == "output"]
    assert (line["mode"], line["step"], line["phase"], line["class"]) == (
        "train",
        1,
        "forward",
        "Linear",
    )
    assert (line["shape"], line["global_shape"], line["layout"]) == ([4, 3], [4, 6], "dtensor")
    assert line["placements"] == {"dp": "Replicate()", "tp": "Shard(1)"}
    assert (line["flags"], line["note"], line["reference"]) == ([], None, None)


def test_what_has_no_numbers_has_its_reason(traces, tmp_path):
    lines = read(traces["odd"], tmp_path / "out.jsonl", path="(root)", rank="0")
    by_slot = {line["slot"]: line for line in lines if line["incarnation"] == 0}
    assert (by_slot["input.0"]["flags"], by_slot["input.0"]["note"]) == (["pending"], "in flight")
    assert by_slot["input.flag"]["dtype"] == "python"
    assert by_slot["input.flag"]["note"].startswith("'a\nb ")
    assert (by_slot["output"]["nan"], by_slot["output"]["posinf"]) == (1, 1)
    assert {line["incarnation"] for line in lines} == {0, 1}


def test_steps_modes_phases_ranks_and_paths_narrow_it(traces, tmp_path):
    def kinds(number, name="grid", **words):
        lines = read(traces[name], tmp_path / f"{number}.jsonl", **words)
        return {(x["mode"], x["step"], x["phase"], x["path"], x["rank"]) for x in lines}

    everything = kinds(0)
    assert {(mode, step) for mode, step, *_ in everything} == {
        ("setup", 0),
        ("train", 0),
        ("train", 1),
    }
    assert kinds(1, step="1") == {each for each in everything if each[:2] == ("train", 1)}
    assert kinds(2, phase="setup") == {each for each in everything if each[0] == "setup"}
    assert kinds(3, rank="1-2,9") == {each for each in everything if each[4] in (1, 2)}
    assert kinds(4, path="f*", phase="backward", step="0", rank="0") == {
        ("train", 0, "backward", "fc", 0)
    }
    assert {each[0] for each in kinds(5, "odd", mode="eval")} == {"eval"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"path": "fcc"}, "'fcc' matches nothing in this trace; the nearest are fc"),
        ({"step": "9"}, "no such step; it holds setup, train step 0, train step 1"),
        ({"rank": "7"}, "the trace holds ranks 0-3"),
        ({"phase": "collective"}, "no value in what is asked for"),
        ({"mode": "eval"}, "no such step"),
    ],
)
def test_a_selection_that_takes_nothing_is_refused_and_leaves_nothing(
    traces, tmp_path, words, said
):
    for name in ("jsonl", "perfetto"):
        with pytest.raises(SelectionError, match=said.replace("value", "(value|call)")):
            exported(traces["grid"], name, tmp_path / "out", **words)
        assert not list(tmp_path.iterdir())


def test_what_exists_is_overwritten_only_by_force(traces, tmp_path):
    (tmp_path / "out").write_text("mine")
    for name in ("jsonl", "perfetto"):
        with pytest.raises(FolderError, match="exists: give a new name"):
            exported(traces["grid"], name, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1
