"""The tree as JSON: what tree.json holds, of any trace and of some of its steps."""

from __future__ import annotations

import json

import pytest

from rankscope.errors import SelectionError
from tests.export.conftest import exported
from tests.tree.jobs import validator


@pytest.mark.parametrize("name", ["grid", "odd", "real"])
def test_it_is_tree_json_byte_for_byte(traces, tmp_path, name):
    exported(traces[name], "json", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (traces[name].path / "tree.json").read_bytes()


def test_a_trace_without_tree_json_has_it_by_export(traces, tmp_path):
    trace = traces["treeless"]
    head = json.loads((trace.path / "trace.json").read_text())
    assert "tree" not in head["storage"]
    assert f"rankscope export {trace.path} --out FILE --format json" in head["storage"]["no_tree"]
    exported(trace, "json", tmp_path / "out")
    found, grid = (
        json.loads(file.read_text())
        for file in (tmp_path / "out", traces["grid"].path / "tree.json")
    )
    validator().validate(found)
    assert [found[name] for name in ("setup", "steps")] == [grid["setup"], grid["steps"]]


def test_some_steps_are_chosen_and_no_part_of_one(traces, tmp_path):
    trace = traces["grid"]
    exported(trace, "json", tmp_path / "one", step="1", mode="train")
    found = json.loads((tmp_path / "one").read_text())
    whole = json.loads((trace.path / "tree.json").read_text())
    assert (found["setup"], found["steps"]) == ([], whole["steps"][1:])
    for words in ({"path": "fc"}, {"rank": "0"}, {"phase": "forward"}):
        with pytest.raises(SelectionError, match="writes whole steps"):
            exported(trace, "json", tmp_path / "part", **words)
    assert {path.name for path in tmp_path.iterdir()} == {"one"}
