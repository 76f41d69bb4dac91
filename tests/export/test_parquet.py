"""The Parquet dataset, read back row by row."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.export.conftest import call_rows, exported, held_values
from tests.export.test_jsonl import COUNTS, STATISTICS
from tests.tree.altered import alter_step
from tests.tree.ranks_on_paper import PaperRank

pq = pytest.importorskip("pyarrow.parquet", reason="the extra rankscope[parquet] is not installed")
dataset = pytest.importorskip("pyarrow.dataset")


@pytest.fixture
def duck():
    duckdb = pytest.importorskip("duckdb", reason="the extra rankscope[viewers] is not installed")
    with duckdb.connect() as connection:
        yield connection


def table(folder):
    """As a user names it: no option."""
    return f"'{folder}/*.parquet'"


def test_duckdb_reads_the_numbers_of_the_trace(trace, tmp_path, duck):
    exported(trace, "parquet", tmp_path / "out")
    query = duck.sql(f"select * from {table(tmp_path / 'out/values')}")
    rows = [dict(zip(query.columns, row)) for row in query.fetchall()]
    held = held_values(trace)
    found = {(row["node"], row["slot"], row["rank"]): row for row in rows}
    assert len(found) == len(rows)
    assert found.keys() == held.keys()
    for key, digest in held.items():
        row = found[key]
        assert row["digested"] == (digest is not None)
        if digest is None:
            assert all(row[name] is None for name in (*COUNTS, *STATISTICS, "hash", "sketch"))
            continue
        assert [row[name] for name in COUNTS] == [getattr(digest, name) for name in COUNTS]
        for name in STATISTICS:
            wanted = getattr(digest, name)
            assert row[name] == (None if math.isnan(wanted) else wanted)
        assert int(row["hash"], 16) == digest.hash
        assert tuple(row["sketch"]) == digest.sketch


def test_mode_and_step_are_columns_inside_the_files(traces, tmp_path, duck):
    exported(traces["grid"], "parquet", tmp_path / "out")
    names = [f"{name}.parquet" for name in ("setup-00000000", "train-00000000", "train-00000001")]
    assert sorted(f.name for f in (tmp_path / "out/values").iterdir()) == names
    where = table(tmp_path / "out/values")
    assert duck.sql(
        f"select mode, step, incarnation, count(*) from {where} group by all order by all"
    ).fetchall() == [("setup", 0, 0, 4), ("train", 0, 0, 20), ("train", 1, 0, 20)]
    assert duck.sql(
        f"select distinct rank, shape, placement from {where} where path = 'fc' and mode = 'train' "
        "and placements['tp'] = 'Shard(1)' and list_contains(shape, 3) order by rank"
    ).fetchall() == [(rank, [4, 3], "dp=Replicate(),tp=Shard(1)") for rank in range(4)]


def test_no_string_is_a_dictionary_and_a_file_says_what_it_is_of(traces, tmp_path):
    """Ray Data groups by no dictionary column, and Dask finds no category in one."""
    exported(traces["grid"], "parquet", tmp_path / "out")
    for name in ("values", "samples", "calls"):
        schema = dataset.dataset(tmp_path / "out" / name).schema
        assert str(schema.field("path").type) == str(schema.field("mode").type) == "string"
        assert str(schema.field("step").type) == "int64"
        assert not [field for field in schema if str(field.type).startswith("dictionary")]
    about = pq.read_schema(tmp_path / "out/values/train-00000001.parquet").metadata
    assert (about[b"rankscope.mode"], about[b"rankscope.step"]) == (b"train", b"1")
    assert about[b"rankscope.complete"] == b"true"


def test_calls_are_a_table_of_their_own(trace, tmp_path):
    exported(trace, "parquet", tmp_path / "out")
    found = {
        (row["node"], row["rank"]): row
        for row in dataset.dataset(tmp_path / "out/calls").to_table().to_pylist()
    }
    calls = call_rows(trace)
    assert found.keys() == calls.keys()
    assert len(calls) == len(trace.columns()["calls.rank"])
    for key, (start, taken, status) in calls.items():
        assert found[key]["start_ns"] == start
        assert found[key]["duration_ns"] == (None if taken < 0 else taken)
        assert found[key]["status"] == status
    for node in trace.walk():
        for outcome in node.outcomes:
            for rank in outcome.ranks:
                row = found[node.id, rank]
                assert row["status"] == outcome.status
                assert (row["path"], row["class"]) == (node.path, node.class_name)


def test_sample_sketches_are_a_table_of_their_own(trace, tmp_path):
    exported(trace, "parquet", tmp_path / "out")
    wanted = {
        (node.id, slot.slot, rank): samples
        for node in trace.walk()
        for slot in node.slots
        for rank, samples in slot.samples().items()
    }
    assert wanted, "every trace here has samples"
    found = {}
    for row in dataset.dataset(tmp_path / "out/samples").to_table().to_pylist():
        key = (row["node"], row["slot"], row["rank"])
        found.setdefault(key, {})[row["sample"]] = tuple(row["sketch"])
        assert row["dim"] == wanted[key].dim
    assert {key: tuple(rows[i] for i in range(len(rows))) for key, rows in found.items()} == {
        key: samples.rows for key, samples in wanted.items()
    }


def test_every_life_of_the_ranks_has_its_file(traces, tmp_path, duck):
    exported(traces["odd"], "parquet", tmp_path / "out")
    names = {f.name for f in (tmp_path / "out/values").iterdir() if f.name.startswith("train")}
    assert names == {"train-00000000.parquet", "train-00000000.1.parquet"}
    query = f"select distinct incarnation from {table(tmp_path / 'out/values')} order by 1"
    assert duck.sql(query).fetchall() == [(0,), (1,)]


def wide_trace(folder):
    """70 ranks, a module with two slots that is called twice, ranks 5 and 6 hold another dtype."""
    for number in range(70):
        rank = PaperRank(folder / "spools", number, 70)
        with rank.call(class_name="Net") as top:
            for path in ("b", "a", "b"):
                with rank.call(path, parent=top) as call:
                    kind = "float64" if number in (5, 6) else "float32"
                    own = np.full(3, number, kind)
                    rank.value(call, "output", own, samples=True, dtype=kind)
                    rank.value(call, "input.0", np.full(3, number, np.float32))
        rank.end()
        rank.ship(folder / "trace")
    build(folder / "trace")
    return open_trace(folder / "trace")


def test_rows_are_sorted_and_cut_into_row_groups(tmp_path, monkeypatch):
    import rankscope.export.parquet as parquet

    monkeypatch.setattr(parquet, "ROWS_A_GROUP", 40)
    trace = wide_trace(tmp_path)
    exported(trace, "parquet", tmp_path / "out")
    names = ("path", "phase", "slot", "micro_batch", "ordinal", "rank")
    for table_name, rows in (("values", 420), ("samples", 630), ("calls", 280)):
        file = pq.ParquetFile(tmp_path / "out" / table_name / "train-00000000.parquet")
        groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        assert sum(groups) == rows
        if table_name == "samples":
            assert max(groups) <= 40
        else:
            assert set(groups[:-1]) == {40}
        own = [name for name in names if name in file.schema_arrow.names]
        keys = [tuple(row[name] for name in own) for row in file.read(own).to_pylist()]
        assert keys == sorted(keys)
    values = dataset.dataset(tmp_path / "out/values").to_table().to_pylist()
    assert {row["rank"] for row in values if row["dtype"] == "float64"} == {5, 6}
    has_own_numbers = [row["mean"] == row["rank"] for row in values]
    assert all(has_own_numbers)
    exported(trace, "parquet", tmp_path / "some", rank="3,69", path="a")
    for table_name, rows in (("values", 4), ("samples", 6), ("calls", 2)):
        some = dataset.dataset(tmp_path / "some" / table_name).to_table().to_pylist()
        assert len(some) == rows
        assert {(row["path"], row["rank"]) for row in some} == {("a", 3), ("a", 69)}


def test_a_dataset_grows_by_whole_steps(traces, tmp_path):
    """As the process that builds the tree of a running job calls it: step by step, and again after
    it was killed."""
    from rankscope.export.parquet import write_step

    trace, out = traces["grid"], tmp_path / "out"
    first, second = trace.steps
    counts = write_step(trace, first, out)
    assert dataset.dataset(out / "values").to_table().num_rows == counts[0] == 20
    assert {f.name for f in out.rglob("*.parquet")} == {"train-00000000.parquet"}
    write_step(trace, second, out)
    write_step(trace, second, out)
    exported(trace, "parquet", tmp_path / "whole", mode="train")
    for name in ("values", "samples", "calls"):
        grown, whole = (
            dataset.dataset(folder / name).to_table() for folder in (out, tmp_path / "whole")
        )
        assert grown.equals(whole)
    assert not [f for f in out.rglob("*") if f.is_file() and f.suffix != ".parquet"]


def test_a_step_that_cannot_be_written_leaves_no_file(tmp_path):
    from rankscope.errors import TraceError
    from rankscope.export.parquet import write_step

    trace = wide_trace(tmp_path)

    def unfit(columns, texts):
        texts.append("no description")
        columns["values.tensor"][-1] = len(texts) - 1  # read when values are written

    alter_step(trace.path, unfit)
    with pytest.raises(TraceError, match="the trace is damaged"):
        write_step(trace, trace.steps[0], tmp_path / "out")
    assert not [f for f in (tmp_path / "out").rglob("*") if f.is_file()]


def test_an_empty_folder_is_taken_and_a_full_one_refused(traces, tmp_path):
    (tmp_path / "out").mkdir()
    exported(traces["grid"], "parquet", tmp_path / "out", step="0")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"values", "samples", "calls"}
    with pytest.raises(Exception, match="exists: give a new name"):
        exported(traces["grid"], "parquet", tmp_path / "out")


def test_without_pyarrow_it_says_what_to_install(traces, tmp_path):
    words = [
        "export",
        str(traces["grid"].path),
        "--format",
        "parquet",
        "--out",
        str(tmp_path / "out"),
    ]
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        f"from rankscope.cli.app import main; main({words!r})"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 2
    assert "pip install 'rankscope[parquet]'" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
