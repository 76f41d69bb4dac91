"""A new column of a step takes its row in the one list and the line that fills it, no more."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.packagecopy import answer_of, copied
from tests.tree import record_forms
from tests.tree.record_golden import rebuilt, unpacked

JOB = "ddp"

ROWS = """
        Column(
            "values.owner", "<i8", "row of its node once more", told=Told.DIGEST, since=2, missing=7
        ),
        Column(
            "calls.seen_ns", "<i8", "start_ns once more", "ns", told=Told.EXPORTS,
            since=2, missing=7,
        ),
"""
FILLED = {"values.owner": "values.node", "calls.seen_ns": "calls.start_ns"}
"""New column -> the column from whose maker its own is copied."""

PROGRAM = """
import json, sys
from pathlib import Path

import jsonschema
import numpy as np
from safetensors.numpy import load_file

import rankscope
from rankscope.export.formats import export
from rankscope.export.formats import Selection
from rankscope.tree.build import recover
from rankscope.tree.reader import open_trace
from tests.tree import columntable

records, folder, before, form = map(Path, sys.argv[1:])
recover([records], folder / "trace")
trace = open_trace(folder / "trace")

def exported(trace, name, out):
    export(trace, name, out, Selection(), lambda what, part: None)
    return out

def told(trace, name):
    jsonl = exported(trace, "jsonl", folder / f"{name}.jsonl")
    lines = [json.loads(line) for line in jsonl.read_text().splitlines()]
    found = {"jsonl": [[line["owner"], line["digested"]] for line in lines]}
    try:
        import pyarrow.dataset as dataset
    except ImportError:
        return found
    out = exported(trace, "parquet", folder / f"{name}-parquet")
    for table, new in (("values", ["owner", "digested"]), ("calls", ["seen_ns", "start_ns"])):
        rows = dataset.dataset(out / table).to_table()
        found[table] = list(zip(*(rows[name].to_pylist() for name in new)))
        found[f"{table} type"] = str(rows.schema.field(new[0]).type)
    return found

def digests(nodes):
    for node in nodes:
        for slot in node["slots"]:
            yield from (value["digest"] for value in slot["values"] if "digest" in value)
        yield from digests(node["children"])

schema = columntable.schema()
tree = json.loads((folder / "trace/tree.json").read_text())
jsonschema.Draft202012Validator(schema).validate(tree)
(file,) = (folder / "trace/steps").iterdir()
columns = load_file(file)
print(json.dumps({
    "package": rankscope.__file__,
    "dtypes": {name: columns[name].dtype.str for name in ("values.owner", "calls.seen_ns")},
    "is_filled": [
        bool((columns["values.owner"] == columns["values.node"]).all()),
        bool((columns["calls.seen_ns"] == columns["calls.start_ns"]).all()),
    ],
    "view": {name: trace.steps[0].columns()[name].dtype.str for name in columns if "." in name
             and name in ("values.owner", "calls.seen_ns")},
    "schema": schema["$defs"]["digest"],
    "tree": [each["owner"] for each in digests(tree["steps"][0]["nodes"])],
    "docs": columntable.tables(),
    "new": told(trace, "new"),
    "before": told(open_trace(before), "before"),
    "format 1": told(open_trace(form), "form"),
}))
"""


def with_a_new_column(package: Path) -> None:
    """Change a copy of the package: a row for each new column, and its line in the maker."""
    table = package / "record/stepcolumns.py"
    text = table.read_text()
    row = '        Column("samples.sketch"'
    assert text.count(row) == 1, f"{table.name} has another row of samples.sketch: change this test"
    table.write_text(text.replace(row, ROWS.lstrip("\n") + row))
    maker = package / "tree/document.py"
    text = maker.read_text()
    for new, old in FILLED.items():
        text, count = re.subn(rf'( +)"{old}": (lambda: .*,\n)', rf'\g<0>\1"{new}": \2', text)
        assert count == 1, (
            f"{maker.name} has no single line that makes {old}: say in FILLED, or here, where the "
            "columns of a step are filled now"
        )
    maker.write_text(text)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a package with two columns more says of a recorded job, and of a trace of today's."""
    folder = tmp_path_factory.mktemp("column")
    with_a_new_column(copied(folder))
    records = unpacked(JOB, folder / "records")
    rebuilt(records, folder / "before")
    form, _ = record_forms.unpacked("inline", folder / "form")  # of format 1
    return answer_of(folder, PROGRAM, records, folder, folder / "before", form)


def test_a_new_column_stands_in_the_step_file_and_in_the_step(found: dict[str, Any]) -> None:
    assert found["dtypes"] == found["view"] == {"values.owner": "<i8", "calls.seen_ns": "<i8"}
    assert found["is_filled"] == [True, True]


def test_a_new_column_stands_in_tree_json_and_its_schema(found: dict[str, Any]) -> None:
    assert found["schema"]["properties"]["owner"] == {"type": "integer"}
    assert "owner" not in found["schema"]["required"], "a trace of today's has no such column"
    assert len({*found["tree"]}) > 1


def test_a_new_column_stands_in_the_tables_of_the_page(found: dict[str, Any]) -> None:
    lines = found["docs"].splitlines()
    assert "| `values.owner` | I64 | row of its node once more (from version 2 on) |" in lines
    assert "| `calls.seen_ns` | I64 | start_ns once more, ns (from version 2 on) |" in lines


def test_a_new_column_stands_in_the_exports(found: dict[str, Any]) -> None:
    new = found["new"]
    assert len(new["jsonl"]) > 100
    for owner, is_digested in new["jsonl"]:
        assert (owner is not None) == is_digested
    if "values" not in new:
        pytest.skip("the extra rankscope[parquet] is not installed")
    assert new["values type"] == new["calls type"] == "int64"
    key = repr
    assert sorted(new["values"], key=key) == sorted(new["jsonl"], key=key)
    assert all(seen == start for seen, start in new["calls"])


@pytest.mark.parametrize("which", ["before", "format 1"])
def test_a_trace_from_before_a_column_says_that_it_is_missing(
    found: dict[str, Any], which: str
) -> None:
    older = found[which]
    assert {owner for owner, is_digested in older["jsonl"] if is_digested} == {7}
    assert {seen for seen, _ in older.get("calls", [(7, 0)])} == {7}
