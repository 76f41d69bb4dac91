"""`rankscope verify`: is all of it there?"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from rankscope.cli.arguments import ExitCode, JsonOption, TraceArgument
from rankscope.cli.terminal import Paint, echo, echo_json, opened
from rankscope.companion.cleanup import is_in_tree
from rankscope.record.ranks import ranks_named
from rankscope.record.texts import NO_STEP, counted, ended_words, endings, said_by_ranks
from rankscope.run.agreements import held_anything
from rankscope.run.folders import REPLICA_FOLDER, TRACE_NAME, find_runs, streams
from rankscope.run.prepare import command_text
from rankscope.tree.crashes import as_json as crash_json
from rankscope.tree.crashes import crashes
from rankscope.tree.reader import begin_in, spool_bases
from rankscope.tree.tensors.kept import missing_chunks, tensor_faults
from rankscope.tree.views import Trace

_ENDS = {
    "lost": "gone without an end record: killed by a signal, aborted, or left by os._exit",
    "running": "no end record had arrived when this was read",
}
"""What ends mean that are not in order."""


def command(trace: TraceArgument = None, as_json: JsonOption = False) -> None:
    """Say per rank what was committed, received and dropped, and read every kept tensor's checksum;
    exit 1 where anything is missing.
    """
    read_trace = opened(trace)
    damaged = [line.removeprefix(f"{read_trace.path}/") for line in read_trace.faults()]
    if not read_trace.is_live:  # the tensors of a rank that lives are not read
        damaged += [*tensor_faults(read_trace.path), *missing_chunks(read_trace)]
    is_clean = read_trace.is_complete and not damaged
    if as_json:
        raised = [crash_json(crash) for crash in crashes(read_trace)]
        state = {"is_live": read_trace.is_live, **read_trace.completeness, "raised": raised}
        report = {"trace": str(read_trace.path), **state, "damaged": damaged}
        echo_json("verify", "clean" if is_clean else "incomplete", report)
    else:
        paint = Paint(sys.stdout)
        for line in _lines(read_trace, paint):
            echo(line)
        for line in damaged:
            echo(paint("red", line))
    raise typer.Exit(ExitCode.FINE if is_clean else ExitCode.FINDING)


def _lines(trace: Trace, paint: Paint) -> Iterator[str]:
    state = trace.completeness
    remarks = [(rank["rank"], text) for rank in state["ranks"] for text in _remarks(rank)]
    counts = Counter(text for _, text in remarks)
    crash_of = {(crash.rank, crash.incarnation): crash for crash in crashes(trace)}
    yield paint(
        "dim", f"{'rank':>6} {'life':>4} {'committed':>12} {'received':>12} {'dropped':>8}  end"
    )
    for rank in state["ranks"]:
        committed = "unknown" if rank["committed"] is None else rank["committed"]
        line = (
            f"{rank['rank']:>6} {rank['incarnation']:>4} {committed:>12} {rank['received']:>12} "
            f"{rank['dropped']:>8}  {rank['end']}"
        )
        yield line if rank["complete"] else paint("red", line)
        crash = crash_of.get((rank["rank"], rank["incarnation"]))
        texts = [*([f"raised: {crash}"] if crash else ()), *_remarks(rank)]
        yield from (f"{'':>6} {text}" for text in texts if counts[text] < 2)
    yield from said_by_ranks(pair for pair in dict.fromkeys(remarks) if counts[pair[1]] > 1)
    for event in state.get("asked", ()):
        asked = f"{event['text']}: {event['mode']} steps {event['first']}-{event['last']} asked for"
        lacking = (f"{ranks_named(m['ranks'])} without {m['steps']}" for m in event["missing"])
        lack = "; ".join(lacking)
        yield paint("red", f"{asked}, {lack}") if lack else f"{asked}, and there"
    if state["missing"]:
        yield paint("red", f"nothing at all from {ranks_named(state['missing'])}")
    if trace.is_complete:
        yield paint("green", "complete: every record of every rank is in the trace")
        if words := ended_words(trace.run):
            yield paint("yellow", f"the job was ended from outside: {words}")
        elif ended := endings(trace.completeness):
            yield paint("red", f"but the job did not end in order: {'; '.join(ended)}")
        if not trace.steps:
            yield paint("yellow", NO_STEP)
    else:
        more = ": the job may still be running" if trace.is_live else ""
        yield paint("red", f"incomplete{more}")
        if not trace.is_live:
            yield from _what_to_add(trace)


def _what_to_add(trace: Trace) -> Iterator[str]:
    """Name the command that adds what this host's spool holds, or where other hosts' would be.

    The trace folder always goes with the spools: it holds full tensors, and maybe records, that
    are nowhere else. No command is named that would lose what the trace has.
    """
    state, bases = trace.completeness, spool_bases(trace.run)
    runs = find_runs(bases, str(trace.run["id"]))
    tree = trace.path / TRACE_NAME
    holding = [
        run
        for run in runs
        if held_anything(run) or not all(is_in_tree(run, stream, tree) for stream in streams(run))
    ]
    lacking = {r["host"] for r in state["ranks"] if r["committed"] != r["received"]}
    if holding and ((trace.path / REPLICA_FOLDER).is_dir() or begin_in(holding, state["ranks"])):
        command = command_text("recover", *holding, trace.path, out=f"{trace.path}-whole")
        yield f"this host still holds records: {command}"
    elif holding:
        yield (
            f"this host still holds records in {', '.join(map(str, holding))}, but the trace was "
            f"written without its own: a trace of those alone would lack what this one has"
        )
    elif not trace.is_written:
        yield (
            "no process here is going to write the tree: "
            + command_text("recover", trace.path, out=f"{trace.path}-whole")
        )
    lacking -= {os.uname().nodename} if runs else set()
    if lacking:
        yield (
            f"{', '.join(sorted(lacking)) or 'a host'} may still hold records, in a folder below "
            f"{' or '.join(str(base) for base in bases)} there: give it and {trace.path} "
            f"to rankscope recover"
        )


def _remarks(rank: Mapping[str, Any]) -> Iterator[str]:
    for gap in rank["gaps"]:
        if gap["last_step"] is None:
            ended = "the rank ended before it could say how many"
            end = "how many is not said yet" if rank["end"] == "running" else ended
            since = f"of {gap['mode']} steps from {gap['first_step']} on"
            yield f"spool full: {since} records are lost; {end}"
            continue
        steps = f"{gap['first_step']}-{gap['last_step']}"
        lost = f"{counted(gap['records'], 'record')} ({counted(gap['bytes'], 'byte')})"
        yield f"spool full: {gap['mode']} steps {steps} lost {lost}"
    if rank["end"] in _ENDS:
        yield _ENDS[rank["end"]]
    if (rank["committed"] or 0) < rank["received"] and rank["committed"] is not None:
        yield "more is here than the rank committed: its records are mixed with others"
    yield from rank["errors"]
    yield from rank["notes"]
    yield from rank.get("tensors", ())
