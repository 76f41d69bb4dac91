"""The Parquet dataset of a running job says what `rankscope export` says of its trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rankscope.companion.running.__main__ import main
from rankscope.export.formats import Selection, export
from rankscope.run.folders import PARQUET_FOLDER, REPLICA_FOLDER
from rankscope.tree.build import build, recover
from rankscope.tree.growingtree import GrowingTree
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.companion.running.growing import grown
from tests.companion.running.test_growing import JOBS
from tests.companion.running.test_paper_jobs import job

pq = pytest.importorskip("pyarrow.parquet", reason="the extra rankscope[parquet] is not installed")


def written_into(work: Path) -> Any:
    from rankscope.export.parquet import write_steps

    return lambda trace: write_steps(trace, work / PARQUET_FOLDER)


def files(dataset: Path) -> dict[str, Any]:
    """Return {TABLE/FILE: its rows}, and that there is nothing else."""
    found = sorted(path for path in dataset.rglob("*") if path.is_file())
    assert {path.suffix for path in found} <= {".parquet"}
    return {
        path.relative_to(dataset).as_posix(): pq.read_table(path).replace_schema_metadata()
        for path in found
    }


def exported(trace: Trace, out: Path) -> dict[str, Any]:
    export(trace, "parquet", out, Selection(), lambda what, part: None)
    return files(out)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, table in found.items():
        assert table.equals(expected[name]), name


@pytest.mark.parametrize("kills", [False, True], ids=["", "killed"])
@pytest.mark.parametrize("which", JOBS)
def test_what_grew_is_what_an_export_writes(tmp_path: Path, which: str, kills: bool):
    out, work = JOBS[which](tmp_path), tmp_path / "work"
    for _ in grown(out, work, pieces=9, kills=kills, dataset=written_into(work)):
        pass
    before = files(work / PARQUET_FOLDER)
    assert sum(name.startswith("values/train") for name in before) > 3
    assert not any("setup" in name for name in before)
    build(work)
    assert main(["--finish-dataset", str(work)]) == 0
    found = files(work / PARQUET_FOLDER)
    assert len(found) > len(before)
    same(found, exported(open_trace(work), tmp_path / "exported"))
    for name, table in before.items():
        assert table.equals(found[name]), name


def test_what_a_kill_left_is_written_again(tmp_path: Path):
    """The files of a part were there, and the part was not yet in the tree."""
    out, work = job(tmp_path), tmp_path / "work"
    write, taken = written_into(work), []

    def killed_in_the_end(trace: Trace) -> None:
        write(trace)
        taken.append([step.step for step in trace.steps])
        if taken[-1][0] > 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for _ in grown(out, work, pieces=9, dataset=killed_in_the_end):
            pass
    assert len(GrowingTree(work).written) == taken[-1][0]
    values = work / PARQUET_FOLDER / "values"
    (values / f".train-{taken[-1][0]:08d}.parquet.1.new").write_bytes(b"PAR1")
    for step in taken[-1]:  # as if something had come late: none of it may count
        shutil.copy(values / "train-00000000.parquet", values / f"train-{step:08d}.parquet")
    shutil.rmtree(work / REPLICA_FOLDER)
    shutil.copytree(out / REPLICA_FOLDER, work / REPLICA_FOLDER)
    build(work)
    assert main(["--finish-dataset", str(work)]) == 0
    same(files(work / PARQUET_FOLDER), exported(open_trace(out), tmp_path / "exported"))


def test_of_a_job_that_was_killed_an_export_makes_all_of_it(tmp_path: Path):
    out, work = job(tmp_path), tmp_path / "work"
    for _ in grown(out, work, pieces=9, dataset=written_into(work)):
        pass
    recover([work], tmp_path / "recovered")
    found = exported(open_trace(tmp_path / "recovered"), tmp_path / "found")
    same(found, exported(open_trace(out), tmp_path / "expected"))


def test_a_trace_that_did_not_grow_gets_all_of_its_dataset_in_the_end(tmp_path: Path):
    out = job(tmp_path)
    build(out)
    assert main(["--finish-dataset", str(out)]) == 0
    same(files(out / PARQUET_FOLDER), exported(open_trace(out), tmp_path / "exported"))


def test_what_cannot_be_written_is_said_in_the_end(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"trace\.json"):
        main(["--finish-dataset", str(tmp_path)])


def test_only_what_was_written_of_a_whole_trace_says_so(tmp_path: Path):
    out, work = job(tmp_path), tmp_path / "work"
    for _ in grown(out, work, pieces=9, dataset=written_into(work)):
        pass
    build(work)
    main(["--finish-dataset", str(work)])
    said = [
        pq.read_schema(path).metadata[b"rankscope.complete"]
        for path in sorted((work / PARQUET_FOLDER / "values").glob("train-*"))
    ]
    assert said[0] == b"false"
    assert (
        pq.read_schema(work / PARQUET_FOLDER / "values/setup-00000000.parquet").metadata[
            b"rankscope.complete"
        ]
        == b"true"
    )
