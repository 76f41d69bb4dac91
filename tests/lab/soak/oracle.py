"""What a finished trace lacks, has twice or has wrong, by what the program wrote down itself.

The trace is read with a JSON parser and a safetensors reader alone, by docs/trace-format.md: an
error in rankscope's own reading cannot hide one in its writing. Of a job that holds its last steps
back (`last:N`) a trace is held to what was asked for: see `tests.lab.soak.asked`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.lab.soak.asked import Account, Asked, ranks_of

__all__ = ["Account", "Findings", "accounts", "compare"]

_COLUMNS = {
    *("nodes.id", "nodes.path", "nodes.phase", "calls.node", "calls.rank"),
    *("values.node", "values.slot", "values.rank", "values.min", "values.max"),
}


@dataclass
class Findings:
    """What is wrong with a trace, at most a few examples of each."""

    calls: int = 0
    """That the programs wrote down."""
    lost: int = 0
    """Calls and values that are not in the trace, and that the trace does not call dropped."""
    dropped: int = 0
    """Calls and values that are not there, of steps that the trace says were dropped."""
    doubled: int = 0
    invented: int = 0
    """Calls of which the program knows nothing, beyond the one that it may have been killed in."""
    wrong: int = 0
    """Values that the program saw otherwise."""
    is_complete: bool = False
    asked: int = 0
    """Steps of ranks that an event asked for and that the rank ran (`last:N`)."""
    there: int = 0
    named: int = 0
    """Steps asked for that are not there, and that the trace names."""
    false: int = 0
    """Steps that the trace says are there, or missing, and that are not so."""
    own_named: list[tuple[str, str]] = field(default_factory=list)
    """Those of them that the rank asked for itself, and why they are missing."""
    excuses: set[str] = field(default_factory=set)
    """Why steps asked for are missing, as the trace says."""
    examples: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.examples) < 5:
            self.examples.append(text)

    @property
    def is_right(self) -> bool:
        """True where nothing is lost, doubled, invented or wrong, and nothing missing is called
        complete."""
        whole = not (self.lost or self.doubled or self.invented or self.wrong or self.false)
        return whole and not self.is_falsely_complete

    @property
    def is_falsely_complete(self) -> bool:
        """True where the trace is called complete, and lacks anything."""
        return self.is_complete and bool(self.lost or self.dropped or self.named)


def accounts(folder: Path) -> list[Account]:
    """Read what the programs wrote down."""
    found = []
    for path in sorted(folder.glob("calls.*.*")):
        _, rank, pid = path.name.split(".")
        one = Account(int(rank), int(pid), path.stat().st_mtime)
        for line in path.read_text().splitlines():
            what, *words = line.split()
            if what == "call":
                one.calls.append((int(words[0]), _path(words[1])))
            elif what == "value":
                low, high = map(float.fromhex, words[2:])
                one.values[int(words[0]), _path(words[1])] = (low, high)
            elif what == "step":
                one.steps += 1
            elif what == "life":
                one.life = int(words[0])
            elif what == "nan":
                one.nans.append(int(words[0]))
            elif what == "dies":
                one.has_died = True
            elif what == "end":
                one.has_ended = True
        found.append(one)
    return found


def compare(
    trace: Path, told: list[Account], untraced: Collection[int] = (), *, last: int = 0
) -> Findings:
    """Hold a finished trace to what the programs wrote down.

    Args:
        trace: the folder.
        told: what they wrote.
        untraced: ranks that said on stderr that they are not traced, as where there is no room for
            a spool; the trace has to say that they are missing.
        last: whole steps that the ranks held back, 0 where they sent all.
    """
    document = json.loads((trace / "trace.json").read_bytes())
    found = Findings(is_complete=document["completeness"]["complete"])
    lives = {(rank["rank"], rank["pid"]): rank["incarnation"] for rank in document["run"]["ranks"]}
    calls, values, nodes = _of_trace(trace, document["steps"], found)
    ends = {(r["rank"], r["incarnation"]): r["end"] for r in document["completeness"]["ranks"]}
    missing = {*ranks_of(document["completeness"]["missing"])}
    asked = Asked(document["completeness"], told, last) if last else None
    left_out = {
        (rank["rank"], rank["incarnation"], step)
        for rank in document["completeness"]["ranks"]
        for gap in rank["gaps"]
        for step in range(gap["first_step"], _end(gap, told))
    }
    for one in told:
        life = lives.get((one.rank, one.pid), -1)
        here = {(step, path) for rank, at, step, path in calls if (rank, at) == (one.rank, life)}
        lacking: dict[int, list[str]] = {}
        for step, path in one.calls:
            lacking.setdefault(step, []).extend([] if (step, path) in here else [path or "."])
        invented = here - {*one.calls}
        if len(invented) > (not one.has_ended):  # killed between the entry and the line
            found.invented += len(invented)
            found.note(f"rank {one.rank}: invented {sorted(invented)[0]}")
        for (step, path), seen in one.values.items():
            recorded = values.get((one.rank, life, step, path))
            if recorded is None:
                lacking.setdefault(step, []).append(f"{path}:output")
            elif recorded != seen:
                found.wrong += 1
                found.note(f"rank {one.rank} step {step} {path}: {recorded}, but it was {seen}")
        if asked is not None:
            of_asked = asked.steps(one)
            found.calls += sum(step in of_asked for step, _ in one.calls)
            most = max((n for key, n in nodes.items() if key[:2] == (one.rank, life)), default=0)
            is_running = ends.get((one.rank, life)) == "running"
            for step in sorted(of_asked):
                lacks = lacking.get(step, [])
                unasked = "no end of its rank had arrived" if is_running else ""
                if (one.rank, life, step) in left_out:
                    unasked = "it dropped records of this step"
                if step < one.steps and not lacks and nodes[one.rank, life, step] < most:
                    lacks = ["backward, gradients or parameters"]
                last_step = max((key[2] for key in nodes if key[:2] == (one.rank, life)), default=0)
                is_at_end = step >= last_step
                _take_asked(found, asked, one, step, lacks, missing, unasked, is_at_end)
            continue
        found.calls += len(one.calls)
        is_missing = one.rank in missing and one.rank in untraced
        for step, lacks in lacking.items():
            if is_missing or (one.rank, life, step) in left_out:
                found.dropped += len(lacks)
            elif lacks:
                found.lost += len(lacks)
                found.note(f"rank {one.rank} life {life} step {step}: {lacks[0]} is lost")
    return found


def _take_asked(
    found: Findings,
    asked: Asked,
    one: Account,
    step: int,
    lacks: list[str],
    missing: set[int],
    unasked: str,
    is_at_end: bool,
) -> None:
    """Hold what the trace says of a step that was asked for to whether it is there."""
    found.asked += 1
    where = f"rank {one.rank} life {one.life} step {step}"
    asking, naming, excuses = asked.said(one, step)
    if not lacks:
        found.there += 1
        if excuses and not is_at_end:  # nobody knows whether a step that is not followed is whole
            found.false += 1
            found.note(f"{where} is there, but the trace says: {excuses[0]}")
    elif one.rank in missing or (asking and naming == asking) or (not asking and unasked):
        found.named += 1
        why = excuses or ["no record" if one.rank in missing else unasked]
        found.excuses.update(why)
        if step in asked.own(one):
            found.own_named.append((where, why[0]))
    elif excuses:
        found.false += 1
        found.note(f"{where} is not there, and {asking - naming} of {asking} events say that it is")
    else:
        found.lost += len(lacks)
        found.note(f"{where} was asked for ({asking} events) and is lost: {lacks[0]}")


def _end(gap: dict[str, Any], told: list[Account]) -> int:
    """Return the step behind a gap: one that the rank could not end goes up to its last step."""
    if gap["last_step"] is not None:
        return int(gap["last_step"]) + 1
    return max((step for one in told for step, _ in one.calls), default=0) + 1


def _of_trace(
    trace: Path, steps: list[dict[str, Any]], found: Findings
) -> tuple[
    Counter[tuple[int, int, int, str]],
    dict[tuple[int, int, int, str], tuple[float, float]],
    Counter[tuple[int, int, int]],
]:
    """Return the forward calls (rank, life, step, path) of a trace, the least and the greatest
    element of their outputs, and how many nodes of any phase each (rank, life, step) has."""
    calls: Counter[tuple[int, int, int, str]] = Counter()
    nodes: Counter[tuple[int, int, str]] = Counter()
    values: dict[tuple[int, int, int, str], tuple[float, float]] = {}
    of_steps: Counter[tuple[int, int, int]] = Counter()
    file, whole, texts = "", dict[str, np.ndarray](), list[str]()
    for step in sorted(steps, key=lambda step: step["file"]):
        if step["file"] != file:
            file = step["file"]
            whole = load_file(trace / file)
            texts = _texts(whole)
        life, number = step["incarnation"], step["step"]
        own = {
            name: column[slice(*step["rows"][name.partition(".")[0]])].tolist()
            for name, column in whole.items()
            if name in _COLUMNS
        }
        paths = [texts[text] for text in own["nodes.path"]]
        is_forward = [texts[text] == "forward" for text in own["nodes.phase"]]
        for node, rank in zip(own["calls.node"], own["calls.rank"]):
            nodes[rank, life, f"{own['nodes.id'][node]:016x}"] += 1
            of_steps[rank, life, number] += step["mode"] == "train"
            if is_forward[node]:
                calls[rank, life, number, paths[node]] += 1
        held = (own[f"values.{name}"] for name in ("node", "slot", "rank", "min", "max"))
        for node, slot, rank, low, high in zip(*held):
            if not is_forward[node] or texts[slot] != "output":
                continue
            key = (rank, life, number, paths[node])
            if key in values:
                found.doubled += 1
                found.note(f"rank {rank} life {life} step {number}: {paths[node]}:output twice")
            values[key] = (low, high)
    for table in (calls, nodes):
        for key, count in table.items():
            if count > 1:
                found.doubled += count - 1
                found.note(f"rank {key[0]} life {key[1]}: {key[2:]} is there {count} times")
    return calls, values, of_steps


def _texts(columns: dict[str, np.ndarray]) -> list[str]:
    """Return the texts of a step file."""
    utf8, ends = columns["utf8.byte"].tobytes(), columns["texts.end"].tolist()
    return [utf8[begin:end].decode() for begin, end in zip([0, *ends], ends)]


def _path(word: str) -> str:
    return "" if word == "." else word
