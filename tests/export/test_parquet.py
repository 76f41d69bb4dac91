"""The Parquet dataset, queried as it lies by the engines it is for."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.export.conftest import exported, held_values
from tests.export.test_jsonl import COUNTS, STATISTICS
from tests.tree.ranks_on_paper import PaperRank

pq = pytest.importorskip("pyarrow.parquet", reason="the extra rankscope[parquet] is not installed")
dataset = pytest.importorskip("pyarrow.dataset")


@pytest.fixture
def duck():
    duckdb = pytest.importorskip("duckdb", reason="the extra rankscope[viewers] is not installed")
    with duckdb.connect() as connection:
        yield connection


def table(folder):
    return f"read_parquet('{folder}/**/*.parquet', hive_partitioning = true)"


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


def test_partitions_are_columns_with_numbers_for_steps(traces, tmp_path, duck):
    exported(traces["grid"], "parquet", tmp_path / "out")
    where = table(tmp_path / "out/values")
    assert duck.sql(
        f"select mode, step, ranks, count(*) from {where} group by all order by all"
    ).fetchall() == [
        ("setup", 0, "000-003", 4),
        ("train", 0, "000-003", 20),
        ("train", 1, "000-003", 20),
    ]
    assert duck.sql(
        f"select distinct rank, shape from {where} where path = 'fc' and step > 0 and "
        "placements['tp'] = 'Shard(1)' and list_contains(shape, 3) order by rank"
    ).fetchall() == [(rank, [4, 3]) for rank in range(4)]


def test_arrow_reads_it_with_its_types_too(traces, tmp_path):
    exported(traces["grid"], "parquet", tmp_path / "out")
    found = dataset.dataset(tmp_path / "out/values", partitioning="hive").to_table()
    assert {str(found.schema.field(name).type) for name in ("path", "slot", "class")} == {
        "dictionary<values=string, indices=int32, ordered=0>"
    }
    assert str(found.schema.field("step").type) == "int32"
    part = next((tmp_path / "out/values").rglob("step=1/**/*.parquet"))
    about = pq.read_schema(part).metadata
    assert (about[b"rankscope.mode"], about[b"rankscope.step"]) == (b"train", b"1")
    assert about[b"rankscope.complete"] == b"true"


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


def test_every_life_of_the_ranks_has_its_part(traces, tmp_path, duck):
    exported(traces["odd"], "parquet", tmp_path / "out")
    names = {f.name for f in (tmp_path / "out/values/mode=train").rglob("*.parquet")}
    assert names == {"part-0.parquet", "part-1.parquet"}
    query = f"select distinct incarnation from {table(tmp_path / 'out/values')} order by 1"
    assert duck.sql(query).fetchall() == [(0,), (1,)]


def test_ranks_are_cut_into_blocks_and_rows_into_groups(tmp_path, monkeypatch):
    import rankscope.export.parquet as parquet

    monkeypatch.setattr(parquet, "ROWS_A_GROUP", 40)
    for number in range(70):
        rank = PaperRank(tmp_path / "spools", number, 70)
        with rank.call() as call:
            rank.value(call, "output", np.full(3, number, np.float32), samples=True)
        rank.end()
        rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    exported(trace, "parquet", tmp_path / "out")
    parts = {f.parent.name: f for f in (tmp_path / "out/values").rglob("*.parquet")}
    assert sorted(parts) == ["ranks=000-063", "ranks=064-069"]
    file = pq.ParquetFile(parts["ranks=000-063"])
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert groups == [40, 24]
    assert file.read(["rank"])["rank"].to_pylist() == sorted(range(64), key=lambda r: r)
    samples = dataset.dataset(tmp_path / "out/samples").to_table()
    assert samples.num_rows == 70 * 3
    exported(trace, "parquet", tmp_path / "some", rank="69")
    assert [f.parent.name for f in (tmp_path / "some/values").rglob("*.parquet")] == [
        "ranks=064-069"
    ]


def test_an_empty_folder_is_taken_and_a_full_one_refused(traces, tmp_path):
    (tmp_path / "out").mkdir()
    exported(traces["grid"], "parquet", tmp_path / "out", step="0")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"values", "samples"}
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
