"""What a finished trace lacks, has twice or has wrong, by what the program wrote down itself.

The trace is read with a JSON parser and a safetensors reader alone, by docs/trace-format.md: an
error in rankscope's own reading cannot hide one in its writing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

__all__ = ["Account", "Findings", "accounts", "compare"]

_COLUMNS = ("node", "rank", "incarnation", "min", "max")


@dataclass
class Account:
    """What one process of a rank wrote down."""

    rank: int
    pid: int
    calls: list[tuple[int, str]] = field(default_factory=list)
    values: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    steps: int = 0
    """Whole ones."""
    has_ended: bool = False


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
    examples: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.examples) < 5:
            self.examples.append(text)

    @property
    def is_right(self) -> bool:
        """True where nothing is lost, doubled, invented or wrong, and nothing missing is called
        complete."""
        whole = not (self.lost or self.doubled or self.invented or self.wrong)
        return whole and not (self.dropped and self.is_complete)


def accounts(folder: Path) -> list[Account]:
    """Read what the programs wrote down."""
    found = []
    for path in sorted(folder.glob("calls.*.*")):
        _, rank, pid = path.name.split(".")
        one = Account(int(rank), int(pid))
        for line in path.read_text().splitlines():
            what, *words = line.split()
            if what == "call":
                one.calls.append((int(words[0]), _path(words[1])))
            elif what == "value":
                low, high = map(float.fromhex, words[2:])
                one.values[int(words[0]), _path(words[1])] = (low, high)
            elif what == "step":
                one.steps += 1
            elif what == "end":
                one.has_ended = True
        found.append(one)
    return found


def compare(trace: Path, told: list[Account], untraced: Collection[int] = ()) -> Findings:
    """Hold a finished trace to what the programs wrote down.

    Args:
        trace: the folder.
        told: what they wrote.
        untraced: ranks that said on stderr that they are not traced, as where there is no room for
            a spool; the trace has to say that they are missing.
    """
    document = json.loads((trace / "trace.json").read_bytes())
    found = Findings(is_complete=document["completeness"]["complete"])
    lives = {(rank["rank"], rank["pid"]): rank["incarnation"] for rank in document["run"]["ranks"]}
    calls, values = _of_trace(trace, document, found)
    left_out = {
        (rank["rank"], rank["incarnation"], step)
        for rank in document["completeness"]["ranks"]
        for gap in rank["gaps"]
        for step in range(gap["first_step"], _end(gap, told))
    }
    missing = {*_ranks(document["completeness"]["missing"])} & {*untraced}
    for one in told:
        if one.rank in missing:
            left_out |= {(one.rank, -1, step) for step, _ in one.calls}
        life = lives.get((one.rank, one.pid), -1)
        here = {(step, path) for rank, at, step, path in calls if (rank, at) == (one.rank, life)}
        found.calls += len(one.calls)
        for step, path in one.calls:
            _take(found, (one.rank, life, step), path, (step, path) in here, left_out)
        invented = here - {*one.calls}
        if len(invented) > (not one.has_ended):  # killed between the entry and the line
            found.invented += len(invented)
            found.note(f"rank {one.rank}: invented {sorted(invented)[0]}")
        for (step, path), seen in one.values.items():
            recorded = values.get((one.rank, life, step, path))
            _take(found, (one.rank, life, step), f"{path}:output", recorded is not None, left_out)
            if recorded is not None and recorded != seen:
                found.wrong += 1
                found.note(f"rank {one.rank} step {step} {path}: {recorded}, but it was {seen}")
    return found


def _end(gap: dict[str, Any], told: list[Account]) -> int:
    """Return the step behind a gap: one that the rank could not end goes up to its last step."""
    if gap["last_step"] is not None:
        return int(gap["last_step"]) + 1
    return max((step for one in told for step, _ in one.calls), default=0) + 1


def _take(
    found: Findings,
    where: tuple[int, int, int],
    what: str,
    is_there: bool,
    left_out: set[tuple[int, int, int]],
) -> None:
    if is_there:
        return
    if where in left_out:
        found.dropped += 1
    else:
        found.lost += 1
        found.note(f"rank {where[0]} life {where[1]} step {where[2]}: {what or '.'} is lost")


def _of_trace(
    trace: Path, document: dict[str, Any], found: Findings
) -> tuple[
    Counter[tuple[int, int, int, str]], dict[tuple[int, int, int, str], tuple[float, float]]
]:
    """Return the forward calls (rank, life, step, path) of a trace, and the least and the greatest
    element of their outputs."""
    calls: Counter[tuple[int, int, int, str]] = Counter()
    nodes: Counter[tuple[int, int, str]] = Counter()
    rows: list[tuple[int, int, str, int, str]] = []
    for step in document["steps"]:
        for node in _walk(_nodes_of(trace, step)):
            life, number = step["incarnation"], step["step"]
            for rank in _ranks(node["ranks"]):
                nodes[rank, life, node["id"]] += 1
                if node["phase"] == "forward":
                    calls[rank, life, number, node["path"]] += 1
            if node["phase"] == "forward":
                rows += [
                    (first, last, node["path"], number, node["id"])
                    for slot in node["slots"]
                    if slot["slot"] == "output"
                    for first, last in [slot["rows"]]
                ]
    for table in (calls, nodes):
        for key, count in table.items():
            if count > 1:
                found.doubled += count - 1
                found.note(f"rank {key[0]} life {key[1]}: {key[2:]} is there {count} times")
    columns = _columns(trace, document)
    values: dict[tuple[int, int, int, str], tuple[float, float]] = {}
    for first, last, path, number, node_id in rows:
        for row in range(first, last):
            key = (
                int(columns["rank"][row]),
                int(columns["incarnation"][row]),
                number,
                path,
            )
            if int(columns["node"][row]) != int(node_id, 16):
                found.wrong += 1
                found.note(f"row {row} is not of node {node_id}")
            if key in values:
                found.doubled += 1
                found.note(f"rank {key[0]} life {key[1]} step {number}: {path}:output twice")
            values[key] = (float(columns["min"][row]), float(columns["max"][row]))
    return calls, values


def _columns(trace: Path, document: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the columns of values: of one file, or of those of some steps each, one behind the
    other."""
    told = document["storage"]["values"]
    files = [told] if isinstance(told, str) else [part["file"] for part in told]
    parts = [load_file(trace / file) for file in files]
    return {name: np.concatenate([part[f"values.{name}"] for part in parts]) for name in _COLUMNS}


def _nodes_of(trace: Path, step: dict[str, Any]) -> list[dict[str, Any]]:
    if "nodes" in step:
        return step["nodes"]
    return json.loads((trace / step["nodes_file"]).read_bytes())["nodes"]


def _walk(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node["children"]


def _ranks(text: str) -> Iterator[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _path(word: str) -> str:
    return "" if word == "." else word
