"""A rule never speaks from a fact that is not there.

Traces of right and of faulty jobs lose one fact at a time, as if the agent had not known it (a
torch that nobody had seen, say). No fault may appear that was not there; a fault that does not rest
on the fact is still found; and the report says what it could not judge.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankscope
from rankscope.diagnosis.check import check
from rankscope.record.call import CallStatus
from rankscope.record.finding import Kind, Report, Verdict
from rankscope.record.ranks import EndReason
from rankscope.tree.build import build
from tests.diagnosis.paper import collective, judged, numbers
from tests.diagnosis.test_pipelines import scheduled
from tests.diagnosis.test_right_programs import train_apart
from tests.diagnosis.test_unlike_steps import averages
from tests.diagnosis.traced import traced
from tests.distributed import collectives_job
from tests.distributed.pool import RankPool
from tests.lab.faults import ranks as fault_ranks
from tests.lab.faults.rows import BY_NAME
from tests.lab.faults.runs import FAULTS
from tests.lab.faults.setup import Setup, Shape
from tests.tree.ranks_on_paper import PaperRank
from tests.tree.record_golden import JOBS, rebuilt, unpacked

Facts = dict[str, Any]


# ---- removals ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank issued in one call."""

    number: int
    """Which call it is, in the order of the tree."""
    rank: int
    facts: Facts
    file: str
    row: int
    """Of the calls in that file."""


@dataclass(frozen=True, slots=True)
class Document:
    """A trace as it lies on disk."""

    head: dict[str, Any]
    files: Mapping[str, tuple[dict[str, np.ndarray], list[str]]]
    """Columns and texts of each step file."""

    @classmethod
    def read(cls, trace: Path) -> Document:
        files = {}
        for path in (trace / "steps").iterdir():
            columns = load_file(path)
            ends, data = columns["texts.end"].tolist(), columns["utf8.byte"].tobytes()
            texts = [data[a:b].decode() for a, b in itertools.pairwise([0, *ends])]
            files[f"steps/{path.name}"] = columns, texts
        return cls(json.loads((trace / "trace.json").read_text()), files)


def of_no_peer(call: Call) -> None:
    call.facts.pop("peer", None)


def of_no_group(call: Call) -> None:
    call.facts["group"] = ""


def of_no_members(call: Call) -> None:
    call.facts["members"] = []


def of_no_op(call: Call) -> None:
    call.facts["op"] = ""


def renamed(call: Call) -> None:
    """A new torch has another word for the op."""
    call.facts["op"] += "_v2"


def everywhere(call: Call, chosen: Call) -> bool:
    return True


def on_one_rank(call: Call, chosen: Call) -> bool:
    return call.rank == chosen.rank


def of_one_call(call: Call, chosen: Call) -> bool:
    return call.number == chosen.number


def once(call: Call, chosen: Call) -> bool:
    return (call.number, call.rank) == (chosen.number, chosen.rank)


def of_one_op(call: Call, chosen: Call) -> bool:
    return call.facts["op"] == chosen.facts["op"]


Scope = Callable[[Call, Call], bool]
SCOPES: tuple[Scope, ...] = (on_one_rank, of_one_call, once)
REMOVALS: Mapping[str, tuple[Callable[[Call], None], tuple[Scope, ...]]] = {
    "peer": (of_no_peer, SCOPES),
    "group": (of_no_group, SCOPES),
    "members": (of_no_members, (once,)),
    "op": (of_no_op, (once,)),
    "name of the op": (renamed, (*SCOPES, of_one_op)),
}
"""What is taken away: from everywhere, and from the calls of a rank, from one call on its ranks or
on one of them, from all of one op. An empty text or list stands in a trace for what is not known.
"""
RESTS_ON: Mapping[str, frozenset[Kind]] = {
    "peer": frozenset({Kind.COLLECTIVE, Kind.HANG}),
    "group": frozenset({Kind.COLLECTIVE, Kind.GROUP, Kind.HANG}),
    "members": frozenset({Kind.COLLECTIVE, Kind.GROUP, Kind.HANG}),
    "op": frozenset({Kind.COLLECTIVE, Kind.HANG}),
    "name of the op": frozenset({Kind.COLLECTIVE, Kind.HANG}),
    "mode": frozenset({Kind.DUPLICATE}),
}
"""The kinds of findings that may go with a fact."""


def calls_of(document: Document) -> list[Call]:
    """Return what each rank issued in every collective, in the order of the tree."""
    calls: list[Call] = []
    number = -1
    for entry in (*document.head["setup"], *document.head["steps"]):
        columns, texts = document.files[entry["file"]]
        begin, end = entry["rows"]["calls"]
        before = -1
        for row in range(begin, end):
            text, node = int(columns["calls.collective"][row]), int(columns["calls.node"][row])
            if text >= 0:
                number += node != before
                before = node
                rank = int(columns["calls.rank"][row])
                calls.append(Call(number, rank, json.loads(texts[text]), entry["file"], row))
    return calls


def changed(document: Document, calls: Iterable[Call], folder: Path) -> None:
    """Write a trace in which these calls have these facts, and the others what they had."""
    files = {
        name: ({**columns, "calls.collective": columns["calls.collective"].copy()}, [*texts])
        for name, (columns, texts) in document.files.items()
    }
    for call in calls:
        columns, texts = files[call.file]
        columns["calls.collective"][call.row] = len(texts)
        texts.append(json.dumps(call.facts))
    (folder / "steps").mkdir(exist_ok=True)
    for name, (columns, texts) in files.items():
        data = [text.encode() for text in texts]
        columns["texts.end"] = np.cumsum([len(each) for each in data], dtype=np.int64)
        columns["utf8.byte"] = np.frombuffer(b"".join(data), np.uint8)
        save_file(columns, folder / name)
    (folder / "trace.json").write_text(json.dumps(document.head))


def removed(document: Document, turn: int | None, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what was taken away, and from where, and have the trace without it in a folder.

    Args:
        document: the trace.
        turn: of all places but everywhere only one is taken, by this number; None for all of them.
        folder: written anew each time.
    """
    whole = calls_of(document)
    for fact, (take, scopes) in REMOVALS.items():
        bearers = [c for c in whole if fact != "peer" or "peer" in c.facts]
        if not bearers:
            continue
        middle = bearers[len(bearers) // 2]
        chosen = scopes if turn is None else scopes[turn % len(scopes) :][:1]
        for scope in (everywhere, *chosen):
            taken = [call for call in calls_of(document) if scope(call, middle)]
            taken = [call for call in taken if fact != "peer" or "peer" in call.facts]
            for call in taken:
                take(call)
            changed(document, taken, folder)
            yield fact, scope.__name__
    for scope in (everywhere, once) if turn is None else ((everywhere, once)[turn % 2],):
        head = json.loads(json.dumps(document.head))
        for step in head["steps"][-1 if scope is once else 0 :]:
            step["mode"] = "unknown"
        changed(Document(head, document.files), (), folder)
        yield "mode", scope.__name__


# ---- what is held --------------------------------------------------------------------------------


def places(report: Report) -> set[tuple[Any, ...]]:
    """Where the findings of a report are, and what they are; the mode may be what is not known."""
    return {
        (f.severity, f.kind, f.phase.word, f.step, f.micro_batch, f.path, f.slot)
        for f in report.findings
    }


def hold(trace: Path, turn: int | None) -> Report:
    """Take every fact away from a trace, and hold each report to that of the whole trace, which is
    returned. `turn` as of `removed`."""
    folder = trace.parent / "without"
    folder.mkdir()
    for file in trace.iterdir():
        if file.name not in ("trace.json", "steps"):
            os.symlink(file, folder / file.name)
    whole = check(trace)
    assert not any(note.startswith("not judged: ") for note in whole.notes)
    before = places(whole)
    for fact, scope in removed(Document.read(trace), turn, folder):
        report = check(folder)
        now = places(report)
        where = f"without {fact} ({scope})"
        assert not now - before, where
        assert not {p for p in before - now if p[1] not in RESTS_ON[fact]}, where
        assert any(note.startswith("not judged: ") for note in report.notes), where

    return whole


@pytest.mark.parametrize("name", JOBS)
def test_golden_jobs_raise_no_fault_for_a_fact_that_is_not_known(tmp_path: Path, name: str) -> None:
    rebuilt(unpacked(name, tmp_path / "records"), tmp_path / "trace")
    hold(tmp_path / "trace", [*JOBS].index(name))


FAULTY = (
    "clipping-on-one-rank", "row-reduce-by-hand", "row-reduce-dtensor", "group-order",
    "collectives-swapped", "from-local-lie", "optimizer-too-early", "same-rows-everywhere",
    "stale-pipeline-buffer", "context-gradient-kept", "router-gradient-kept", "dtype-left-behind",
    "sequence-norm-partial",
)  # fmt: skip
RIGHT = (
    "pipeline", "zero", "one-rank-evaluates", "hsdp", "expert-parallel", "fsdp2-uneven",
    "context-parallel",
)  # fmt: skip
BOARD = (*FAULTY, *RIGHT)


def of_the_board(pool: RankPool, name: str, folder: Path) -> Path:
    """Trace a small job of the fault board."""
    world = BY_NAME[name].ranks[0]
    shape = Shape(layers=2, hidden=8, context=4, batch=4)
    setup = Setup(shape=shape, ranks=world, is_faulty=name in FAULTY)
    return traced(pool, fault_ranks.traced, FAULTS, name, setup, False, folder=folder, world=world)


@pytest.mark.parametrize("name", BOARD)
def test_jobs_of_the_fault_board_raise_no_fault_for_a_fact_that_is_not_known(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    report = hold(of_the_board(ranks, name, tmp_path), BOARD.index(name))
    assert bool(report.findings) is (name in FAULTY)


@pytest.mark.soak
@pytest.mark.parametrize("name", BOARD)
def test_nor_wherever_it_is_taken_away(ranks: RankPool, tmp_path: Path, name: str) -> None:
    hold(of_the_board(ranks, name, tmp_path), None)


def issues_everything(out: str) -> None:
    """Every collective that torch has."""
    warnings.simplefilter("ignore")
    with rankscope.trace(out=out, steps="all"), torch.no_grad():
        collectives_job.Calls()()


def evaluates_alike(out: str) -> None:
    """Ranks train on data of their own, and all evaluate the same batches."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held_out = torch.randn(4, 6)
    torch.manual_seed(1 + dist.get_rank())
    with rankscope.trace(model, out=out, steps="all"):
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(held_out)


LEGAL: Mapping[str, tuple[Any, ...]] = {
    "every collective": (issues_everything,),
    "evaluates alike": (evaluates_alike,),
    "averages by shares": (train_apart, "shares"),
    "averages what is gathered": (train_apart, "gathered"),
    "averages with a neighbour": (train_apart, "neighbour"),
    "unlike steps": (averages, "each", "all", 2, ""),
    "unlike evaluations": (averages, "eval", "all", 2, ""),
    "unlike steps, sent": (averages, "sent", "all", 2, ""),
    "1f1b": (scheduled, "1f1b"),
}
"""Right programs of which collectives say that they are right."""


@pytest.mark.parametrize("name", LEGAL)
def test_programs_that_collectives_show_to_be_right_raise_no_fault_for_a_fact_that_is_not_known(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    report = hold(traced(ranks, *LEGAL[name], folder=tmp_path, world=2), [*LEGAL].index(name))
    assert not report.findings


@pytest.mark.parametrize("is_killed", [True, False])
def test_nobody_is_blamed_for_a_wait_of_which_a_fact_is_not_known(
    tmp_path: Path, is_killed: bool
) -> None:
    """A rank does not come: killed with the job, or by an exception of its own, which stays."""

    def write(rank: PaperRank) -> None:
        top = rank.enter(class_name="Model")
        with rank.call("first", parent=top) as first:
            given = numbers(0, 6) + numbers(1, 6)
            collective(rank, "first", 0, numbers(rank.rank, 6), given, parent=first)
        head = rank.enter("head", parent=top)
        if rank.rank == 0:
            collective(rank, "head", 1, numbers(0, 6), None, parent=head)
        elif not is_killed:
            rank.exit(head, CallStatus.RAISED, "ZeroDivisionError: division by zero")
            rank.exit(top, CallStatus.RAISED, "ZeroDivisionError: division by zero")

    ends = {0: EndReason.LOST, 1: EndReason.LOST if is_killed else EndReason.RAISED}
    judged(tmp_path, 2, write, ends=ends)
    kinds = {finding.kind for finding in hold(tmp_path / "trace", None).findings}
    assert kinds == ({Kind.HANG} if is_killed else {Kind.HANG, Kind.CRASH})


def test_a_torch_newer_than_all_that_were_tested_is_a_note(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    for number, version in enumerate(("2.13.0", "99.1.0+cpu")):
        rank = PaperRank(tmp_path, number, 2, identity={"versions": {"torch": version}})
        with rank.call(class_name="Model") as top:
            rank.value(top, "output", numbers(0))
        rank.end(EndReason.EXIT)
        rank.ship(out)
    build(out)
    said = json.loads((out / "trace.json").read_text())["run"]["untested"]
    assert "99.1.0+cpu" in said and "nothing is known to be wrong" in said and "2.13" not in said
    report = check(out)
    assert report.verdict is Verdict.CLEAN and said in report.notes
