"""One table says what statistics there are: a row more is all that another one takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rankscope.capture.measuring import ValueNumbers
from rankscope.record.statistics import ADDED, COUNTS, MEASURED, NUMBERS, Combined
from rankscope.record.value import Digest
from rankscope.spool.recordformat import VALUE, VALUE_DTYPE
from tests.packagecopy import REPOSITORY, answer_of, copied

DOCS = REPOSITORY / "docs"

ROWS = """
    Statistic(
        name="median_abs",
        meaning="upper median of the absolute finite elements",
        over_shards=OverShards.UNKNOWN,
        of_values=lambda values: sorted(abs(values).tolist())[len(values) // 2],
    ),
    Statistic(
        name="abs_sum",
        meaning="sum of the absolute finite elements",
        over_shards=OverShards.SUM,
        of_values=lambda values: abs(values).sum(),
    ),
)
\"\"\"In the order"""

JOB = """
import json, sys
from pathlib import Path
import jsonschema, torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner
import rankscope
from rankscope.cli.app import app
from rankscope.tree.reader import open_trace
from tests.tree.columntable import schema

folder = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

class Model(torch.nn.Module):
    def forward(self, x):
        return {"plain": x * 2, "sharded": distribute_tensor(x, mesh, [Shard(0)])}

x = torch.tensor([[-4.0, 1.0, 2.0], [float("nan"), float("-inf"), 0.5]])
model = Model()
with rankscope.trace(model, out=folder / "trace", steps="0"):
    with torch.no_grad():
        model(x)

def rankscope_says(*arguments):
    done = CliRunner().invoke(app, [str(word) for word in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output

trace_file = folder / "trace/tree.json"
text = json.loads(trace_file.read_text())
jsonschema.Draft202012Validator(schema()).validate(text)
trace = open_trace(folder / "trace")
(node,) = trace.find("", phase="forward")
value, shard = node.value("output.plain"), node.value("output.sharded")
columns = node.step
row = next(s for s in node.slots if s.slot == "output.plain").rows.start
names = ["median_abs", "abs_sum", "mean"]
slots = {s["slot"]: s for s in text["steps"][0]["nodes"][0]["slots"]}
rankscope_says("export", folder / "trace", "--format", "jsonl", "--out", folder / "x.jsonl")
lines = [json.loads(line) for line in (folder / "x.jsonl").read_text().splitlines()]
found = {
    "package": rankscope.__file__,
    "digest": [value.per_rank[0].number(name) for name in names],
    "json": [slots["output.plain"]["values"][0]["digest"][name] for name in names],
    "columns": [float(columns[f"values.{name}"][row]) for name in names],
    "combined": [shard.combined.number(name) for name in names],
    "combined_json": [slots["output.sharded"]["combined"][0]["digest"][name] for name in names],
    "jsonl": [next(e[name] for e in lines if e["slot"] == "output.plain") for name in names],
    "show": rankscope_says("show", folder / "trace", "--stats", ",".join(names)),
    "help": rankscope_says("show", "--help"),
}
try:
    import pyarrow.parquet as parquet
except ImportError:
    found["parquet"] = None
else:
    rankscope_says("export", folder / "trace", "--format", "parquet", "--out", folder / "pq")
    rows = parquet.read_table(folder / "pq/values").to_pylist()
    found["parquet"] = [
        next(each[name] for each in rows if each["slot"] == "output.plain") for name in names
    ]
(file,) = (folder / "trace/steps").iterdir()
kept = load_file(file)
for name in ("median_abs", "abs_sum"):  # as a package without these rows writes it
    del kept[f"values.{name}"]
save_file(kept, file)
found["old"] = rankscope_says("show", folder / "trace", "--stats", ",".join(names))
print(json.dumps(found))
"""


def test_typed_records_have_the_measured_statistics_in_the_order_of_the_table() -> None:
    names = [s.name for s in MEASURED]
    fields = [f.name for f in dataclasses.fields(Digest)]
    assert fields == [*names, "hash", "sketch", "added"]
    fields = [f.name for f in dataclasses.fields(Combined)]
    assert fields == ["ranks", "note", *names, "sketch", "added"]
    read = [name for name in ValueNumbers._fields if name in {*names}]
    assert read == names
    between = ValueNumbers._fields.index("hash") + 1, ValueNumbers._fields.index("sketch")
    assert list(ValueNumbers._fields[slice(*between)]) == names[1:], "the recorder packs these"


@pytest.mark.skipif(bool(ADDED), reason="the bytes below are those without added statistics")
def test_the_table_leaves_the_bytes_of_a_spool_as_they_were() -> None:
    assert VALUE.format == "<QqIIIBxHQQQ" + "QQQQddddd" + "8d" + "32x"
    assert VALUE_DTYPE.names is not None
    first = VALUE_DTYPE.names.index("nan")
    names = ("nan", "posinf", "neginf", "zero", "min", "max", "mean", "std", "l2")
    assert VALUE_DTYPE.names[first:] == (*names, "sketch", "spare")


def test_the_pages_name_every_statistic() -> None:
    """Where the columns are listed. `show --help` takes the names from the table itself."""
    for page in ("trace-format.md", "commands/export.md"):
        text = (DOCS / page).read_text().replace("`", " ").replace(",", " ").split()
        missing = [name for name in (*COUNTS, *NUMBERS) if name not in text]
        assert not missing, f"docs/{page} does not name {', '.join(missing)}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a package with two rows more in the one table says of a traced call."""
    folder = tmp_path_factory.mktemp("added")
    table = copied(folder) / "record/statistics.py"
    text = table.read_text()
    marker = ')\n"""In the order'
    assert text.count(marker) == 1
    table.write_text(text.replace(marker, ROWS.lstrip("\n")))
    return answer_of(folder, JOB, folder)


def test_a_row_more_in_the_table_stands_in_the_record_the_json_and_the_columns(
    found: dict[str, Any],
) -> None:
    expected = [4.0, 15.0, -0.25]
    assert found["digest"] == expected
    assert found["json"] == expected
    assert found["columns"] == expected


def test_a_row_more_in_the_table_stands_in_show_and_in_the_exports(found: dict[str, Any]) -> None:
    expected = [4.0, 15.0, -0.25]
    assert "median_abs 4  abs_sum 15  mean -0.25" in found["show"]
    assert "median_abs" in found["help"]
    assert found["jsonl"] == expected
    if found["parquet"] is None:
        pytest.skip("the extra rankscope[parquet] is not installed")
    assert found["parquet"] == expected


def test_a_row_more_in_the_table_combines_over_shards_as_it_says(found: dict[str, Any]) -> None:
    """A sum adds up; of a median the whole's is not known, and nothing is made up."""
    assert found["combined"] == [None, 7.5, -0.125]
    assert found["combined_json"] == [None, 7.5, -0.125]


def test_a_trace_written_before_a_statistic_was_added_still_opens(found: dict[str, Any]) -> None:
    assert "median_abs -  abs_sum -  mean -0.25" in found["old"]
