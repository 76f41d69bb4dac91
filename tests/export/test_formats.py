"""Every export format of real runs whose calls do not all return: activation checkpointing stops
some, torch.compile enters others unseen, and nobody waits for an asynchronous collective."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch import nn

import rankscope
import rankscope.tree
from rankscope.export.formats import FORMATS
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.ranks import parse_ranks
from rankscope.record.value import is_form
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.companion.running.growing import grown
from tests.companion.running.test_paper_jobs import job
from tests.distributed import collectives_job
from tests.distributed.pool import RankPool
from tests.export.conftest import exported, held_values
from tests.export.test_perfetto import played, unpacked
from tests.models import Layered, Residual
from tests.tree.jobs import validator

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = Path(rankscope.tree.__file__).parent / "trace.schema.json"


def network(*, is_checkpointed: bool) -> Layered:
    """Two blocks whose last module a recomputation need not reach, and a head."""
    blocks = (Residual(has_last=True) for _ in range(2))
    return Layered(blocks, nn.Linear(4, 1), is_checkpointed=is_checkpointed)


def train(model: nn.Module, out: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out, tensors="**"):
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def checkpointed_run(out: Path, ranks: RankPool) -> None:
    train(network(is_checkpointed=True), out)


def compiled_run(out: Path, ranks: RankPool) -> None:
    model = network(is_checkpointed=False)
    model.layers[0].compile(backend="eager")
    model.layers[1] = torch.compile(model.layers[1], backend="aot_eager")
    train(model, out)


def asynchronous_run(out: Path, ranks: RankPool) -> None:
    ranks.run(collectives_job.run_careless, str(out.parent), world_size=2)


RUNS = {
    "stopped": checkpointed_run,
    "not_entered": compiled_run,
    "not_waited": asynchronous_run,
}
"""By the status that sets them apart."""


@pytest.fixture(scope="module", params=RUNS)
def run(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Trace:
    """Each run is traced once, for all formats."""
    out = tmp_path_factory.mktemp(request.param) / "trace"
    RUNS[request.param](out, ranks)
    found = open_trace(out)
    assert request.param in {node.status for node in found.walk()}, "else it tests nothing"
    return found


def statuses(trace: Trace) -> dict[tuple[str, int], str]:
    """Return {(node, rank): status}, as the tree says it."""
    return {
        (node.id, rank): outcome.status
        for node in trace.walk()
        for outcome in node.outcomes
        for rank in outcome.ranks
    }


def read_perfetto(trace: Trace, out: Path) -> None:
    _, files = unpacked(out)
    found = {
        (each["args"]["node"], int(name[4:9])): each["args"]["status"]
        for name, packets in files.items()
        for each in played(packets)[1]
        if each["track"] != "steps"
    }
    assert found == statuses(trace)


def has_the_values(trace: Trace, rows: list[dict[str, Any]]) -> None:
    held = {key: own for key, own in held_values(trace).items() if not is_form(key[1])}
    found = {(row["node"], row["slot"], row["rank"]): row for row in rows}
    assert len(found) == len(rows)
    assert found.keys() == held.keys()
    assert all(found[key]["digested"] == (digest is not None) for key, digest in held.items())


def read_json(trace: Trace, out: Path) -> None:
    tree = json.loads(out.read_text())
    validator().validate(tree)

    def below(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [node, *(each for child in node["children"] for each in below(child))]

    steps = (*tree["setup"], *tree["steps"])
    nodes = [each for step in steps for top in step["nodes"] for each in below(top)]
    found = {
        (node["id"], rank): own["status"]
        for node in nodes
        for own in node.get("outcomes", [node])
        for rank in parse_ranks(own["ranks"])
    }
    assert found == statuses(trace)


def read_jsonl(trace: Trace, out: Path) -> None:
    has_the_values(trace, [json.loads(line) for line in out.read_text().splitlines()])


def read_parquet(trace: Trace, out: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    has_the_values(trace, parquet.read_table(out / "values").to_pylist())


def read_hf(trace: Trace, out: Path) -> None:
    """The debugger's files know forwards alone, and no call that nothing saw."""
    seen = [
        node.path
        for node in trace.walk()
        if node.phase is Phase.FORWARD and node.status != CallStatus.NOT_ENTERED.word
        for _ in node.ranks
    ]

    def paths(call: dict[str, Any]) -> list[str]:
        assert "error" not in call
        below = [path for child in call.get("children", ()) for path in paths(child)]
        return [call["module_path"].partition(".")[2], *below]

    files = sorted(out.glob("*_FULL_TENSORS.json"))
    found = [path for file in files for path in paths(json.loads(file.read_text()))]
    assert sorted(found) == sorted(seen)


READERS: dict[str, Callable[[Trace, Path], None]] = {
    "json": read_json,
    "perfetto": read_perfetto,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "hf": read_hf,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_whose_calls_do_not_all_return_is_exported_whole(
    run: Trace, name: str, tmp_path: Path
) -> None:
    """A format that knows some ways for a call to end, and not all, fails here."""
    if name == "parquet":
        pytest.importorskip("pyarrow.parquet", reason="the extra rankscope[parquet] is missing")
    exported(run, name, tmp_path / "out")
    READERS[name](run, tmp_path / "out")


def test_the_schema_and_the_page_of_the_format_know_every_way_a_call_can_end() -> None:
    """Both are for readers without rankscope, who have no other list."""
    words = [status.word for status in CallStatus]
    parts = json.loads(SCHEMA.read_text())["$defs"].values()
    listed = [
        each["properties"]["status"] for each in parts if "status" in each.get("properties", {})
    ]
    assert listed
    for each in listed:
        assert set(each["enum"]) - {"mixed", "unknown"} == set(words)
    page = (DOCS / "trace-format.md").read_text()
    (numbers,) = re.findall(r"^\* `calls\.status`: (.*)\.$", page, re.MULTILINE)
    assert numbers == ", ".join(f"{int(status)} {status.word}" for status in CallStatus)
    (row,) = re.findall(r"^\| `status` \| (.*) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) - {"mixed", "outcomes"} == set(words)


@pytest.mark.parametrize("name", ["perfetto", "jsonl"])
def test_a_trace_that_grew_while_its_job_ran_is_exported_as_any(name: str, tmp_path: Path) -> None:
    """Its rows stand in the order in which steps ended, with setup behind them."""
    out, work = job(tmp_path, evaluates=True), tmp_path / "work"
    for _ in grown(out, work, pieces=9):
        pass
    for folder in (out, work):
        build(folder)
        exported(open_trace(folder), name, folder / "exported")
    if name == "jsonl":
        assert (work / "exported").read_bytes() == (out / "exported").read_bytes()
        return
    with ZipFile(out / "exported") as theirs, ZipFile(work / "exported") as own:
        assert own.namelist() == theirs.namelist()
        for member in own.namelist():
            assert own.read(member) == theirs.read(member)
