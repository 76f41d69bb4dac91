"""`--rs-parquet 1`: a Parquet dataset grows beside the tree, and is whole when the job is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
from tests.launcher.launches import Start, kill
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("growing"),
    installed,
]
SCRIPT = """
import os, pathlib, sys, time
import torch
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
step = 0
while step < 20 or not (folder / "leave").exists():
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 20:
        (folder / f"trained.0.{rank}").touch()
    time.sleep(0.2)
"""


def test_a_dataset_grows_and_is_whole_in_the_end(launch: Start):
    duckdb = pytest.importorskip("duckdb", reason="the extra rankscope[viewers] is not installed")
    job = launch(["a", "b"], "--rs-steps", "all", "--rs-live-check", 0, "--rs-parquet", 1)
    job.trained()
    files = f"{job.out}/parquet/values/*.parquet"

    def written() -> int:
        if not any((job.out / "parquet/values").glob("*.parquet")):
            return 0
        ((rows,),) = duckdb.sql(f"select count(distinct step) from '{files}'").fetchall()
        return int(rows)

    assert wait_until(written, 60.0), job.logs
    before = written()
    kill(job.beside())
    assert wait_until(lambda: written() > before, 60.0), job.logs
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.logs
    trace = open_trace(job.out)
    assert trace.is_complete and len(trace.steps) > before
    for table, column in (("values", "values.rank"), ("calls", "calls.rank")):
        name = f"{job.out}/parquet/{table}/*.parquet"
        ((found,),) = duckdb.sql(f"select count(*) from '{name}'").fetchall()
        assert found == len(trace.columns()[column]), job.logs
    found = duckdb.sql(f"select distinct mode, step from '{files}' order by all").fetchall()
    assert found == [("setup", 0), *(("train", step.step) for step in trace.steps)]
    assert not (job.out / "collector.log").exists()


def test_without_pyarrow_the_job_runs_without(
    launch: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pyarrow'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")  # so that it starts as a Python of its own
    job = launch(["a"], "--rs-parquet", 1)
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.logs
    assert job.err.count("no Parquet dataset: pyarrow is missing; pip install 'rankscope[") == 1
    assert open_trace(job.out).is_complete
    assert not (job.out / "parquet").exists()
