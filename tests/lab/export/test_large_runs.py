"""The queries of docs/large-runs.md, as they stand there, in the engines they are for: what they
answer is what rankscope says of the same traces.

DuckDB comes with the extra `viewers`. Spark and Ray come with the extra `engines`, which
`launcher/test` does not install; docs/contributing.md says how to run these tests by hand.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from rankscope.diagnosis.check import check
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
from tests.diagnosis.traced import traced
from tests.export.conftest import exported
from tests.lab.export import large_runs_job

PAGE = (Path(__file__).parents[3] / "docs/large-runs.md").read_text()
QUESTIONS = dict(
    re.findall(r"^## ([^\n]*\?)$.*?^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
pytest.importorskip("pyarrow", reason="the extra rankscope[parquet] is not installed")


def package(name):
    """Import what is optional, or skip."""
    extra = "viewers" if name == "duckdb" else "engines"
    return pytest.importorskip(name, reason=f"the extra rankscope[{extra}] is not installed")


def engine_of(name, folder):
    """Run the program of the page that imports a package; return the names it leaves. The folder
    is written out: Spark's Java stays in the directory it was started in."""
    (found,) = (each for each in PROGRAMS if re.search(rf"^(import|from) {name}\b", each, re.M))
    names = {}
    exec(re.sub(r"(?<=[\"'])dataset(?=/)", str(folder / "dataset"), found), names)
    return names


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """{name: (trace, folder that holds its dataset)}"""
    made = {}
    for job, world in ((large_runs_job.drifts, 2), (large_runs_job.shards, 4)):
        folder = tmp_path_factory.mktemp(job.__name__)
        trace = open_trace(traced(ranks, job, folder=folder, world=world))
        exported(trace, "parquet", folder / "dataset")
        made[job.__name__] = trace, folder
    return made


@pytest.fixture(scope="module")
def spark():
    """A session as the page gets it, on this machine alone."""
    sql = package("pyspark.sql")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java: java is not on PATH")
    options = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
    builder = sql.SparkSession.builder.master("local[2]").config("spark.driver.host", "127.0.0.1")
    for name, value in options.items():
        builder = builder.config(name, value)
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
    yield session
    session.stop()


@pytest.fixture(params=["duckdb", "pyspark"])
def ask(request, runs):
    """A function (run, question) -> rows as dicts, by the programs and queries of the page."""
    package(request.param)
    if request.param == "pyspark":
        request.getfixturevalue("spark")

    def asked(run, question):
        found = engine_of(request.param, runs[run][1])["engine"].sql(QUESTIONS[question])
        if request.param == "pyspark":
            return [row.asDict() for row in found.collect()]
        return [dict(zip(found.columns, row)) for row in found.fetchall()]

    return asked


def test_the_page_asks_four_questions():
    assert len(QUESTIONS) == 4
    assert len(PROGRAMS) == 3


def test_replicas_that_drift_are_found_where_check_finds_them(ask, runs):
    (wanted,) = (each for each in check(runs["drifts"][0]).findings if each.kind is Kind.REPLICA)
    found = ask("drifts", "In which step do replicas of a parameter first differ?")
    assert (found[0]["step"], found[0]["path"], found[0]["slot"]) == (
        wanted.step,
        wanted.path,
        wanted.slot,
    )
    assert wanted.step == large_runs_job.DRIFT + 1, "the weight is changed behind that step"
    assert found[0]["different"] == 2
    assert {row["path"] for row in found if row["step"] == wanted.step} == {"third"}
    assert not ask("shards", "In which step do replicas of a parameter first differ?")


def test_the_first_nan_is_where_check_finds_it(ask, runs):
    (wanted,) = (each for each in check(runs["drifts"][0]).findings if each.kind is Kind.NONFINITE)
    first = ask("drifts", "Where did the first NaN stand?")[0]
    assert (first["step"], first["phase"], first["path"], first["slot"], first["lowest_rank"]) == (
        wanted.step,
        wanted.phase.word,
        wanted.path,
        wanted.slot,
        *wanted.ranks,
    )
    assert not ask("shards", "Where did the first NaN stand?")


def test_the_norm_of_a_sharded_gradient_is_that_of_the_whole(ask, runs):
    trace = runs["shards"][0]
    wanted = []
    for step in trace.steps:
        value = trace.value("2", "grad:weight", step=step.step)
        assert "Shard(0)" in str(value.layout), "else nothing is summed"
        wanted.append(value.combined.l2)
    found = ask("shards", "How did the norm of a gradient move?")
    assert [row["step"] for row in found] == list(range(large_runs_job.STEPS))
    np.testing.assert_allclose([row["norm"] for row in found], wanted, rtol=1e-12)
    assert len(set(wanted)) == len(wanted)


def test_the_slowest_rank_of_a_module_is_the_one_that_sleeps(ask, runs):
    trace = runs["drifts"][0]
    spent = {}
    for node in trace.walk():
        if node.phase is Phase.FORWARD:
            columns, own = node.step, node.call_rows
            for rank, ns in zip(columns["calls.rank"][own], columns["calls.duration_ns"][own]):
                spent.setdefault(node.path, {}).setdefault(int(rank), []).append(int(ns))
    rows = {row["path"]: row for row in ask("drifts", "Which rank is slowest in each module?")}
    assert rows.keys() == spent.keys()
    for path, by_rank in spent.items():
        ms = {rank: sum(each) / 1e6 for rank, each in by_rank.items()}
        assert rows[path]["slowest"] == max(ms, key=ms.get)
        assert rows[path]["slowest_ms"] == pytest.approx(max(ms.values()))
        assert rows[path]["typical_ms"] == pytest.approx(float(np.median([*ms.values()])))
    assert rows["second"]["slowest"] == 0
    assert rows["second"]["slowest_ms"] >= 1e3 * large_runs_job.SLOW_S * large_runs_job.STEPS


def test_ray_groups_by_what_used_to_be_dictionaries(runs):
    ray = package("ray")
    trace, folder = runs["drifts"]
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        rows = engine_of("ray", folder)["found"].groupby("path").max("l2").take_all()
        again = ray.data.read_parquet(str(runs["shards"][1] / "dataset/values"))
        placed = again.select_columns(["placement"]).groupby("placement").count().take_all()
    finally:
        ray.shutdown()
    wanted = {}
    for node in trace.walk():
        for slot in node.slots:
            for digest in slot.per_rank().values():
                if digest is not None and not np.isnan(digest.l2):
                    wanted[node.path] = max(digest.l2, wanted.get(node.path, 0.0))
    found = {row["path"]: row["max(l2)"] for row in rows}
    assert {path: norm for path, norm in found.items() if norm is not None} == wanted
    assert "replicate=Replicate(),shard=Shard(0)" in {row["placement"] for row in placed}
