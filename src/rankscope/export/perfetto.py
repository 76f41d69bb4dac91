"""`--format perfetto`: the calls of all ranks on one clock, for ui.perfetto.dev and its SQL.

A ZIP of one Perfetto trace per rank and life, and a manifest that says which host each is from and
that wall-clock time is the clock of all. On every rank the steps are one track, and each phase has
tracks of its own. The events of a step are in memory, the ranks' files grow beside the export.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from rankscope.errors import SelectionError
from rankscope.export import packets
from rankscope.export.formats import ExportPlace
from rankscope.export.subset import Selection
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.record.statistics import COUNTS, numbers_with_first
from rankscope.record.value import Digest
from rankscope.run.filenames import Progress
from rankscope.tree.views import Node, Step, Trace

T = TypeVar("T")


class Span(NamedTuple, Generic[T]):
    """One call."""

    start: int
    end: float
    """math.inf where its end was not recorded."""
    what: T


class SliceEdge(NamedTuple, Generic[T]):
    """Where a slice begins or ends."""

    lane: int
    time: int
    begins: T | None
    """What begins; None where the innermost open slice of the lane ends."""


def edges(spans: Iterable[Span[T]]) -> Iterator[SliceEdge[T]]:
    """Yield the edges of spans, in order of time on every lane.

    A span lies inside those that last longer, and where two last equally long, inside the one that
    was given first: give parents first. One that begins inside another and outlasts it goes to the
    next lane. A span without end ends with the slice it lies in; outside of any it stays open.
    """
    open_ends: list[list[float]] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        lane = 0
        for lane, ends in enumerate(open_ends):
            yield from _closed(lane, ends, span.start)
            if not ends or span.end <= ends[-1] or span.end == math.inf:
                break
        else:
            lane = len(open_ends)
            open_ends.append([])
        ends = open_ends[lane]
        ends.append(min(span.end, ends[-1]) if ends else span.end)
        yield SliceEdge(lane, span.start, span.what)
    for lane, ends in enumerate(open_ends):
        yield from _closed(lane, ends, math.inf)


def _closed(lane: int, ends: list[float], now: float) -> Iterator[SliceEdge[T]]:
    """End what has ended by now; what has no end stays open."""
    while ends and ends[-1] <= now and ends[-1] != math.inf:
        yield SliceEdge(lane, int(ends.pop()), None)


MAX_EVENTS = 2_000_000
"""What a viewer still opens. The beginning and the end of a call are two events."""
_MAX_RESULTS = 4
_STEPS, _ERRORS = "steps", "errors"
_TRACKS = (_STEPS, _ERRORS, *(phase.word for phase in Phase))
_FIRST_FREE_PID = 1 << 22
"""Linux gives no larger one."""


@dataclass(slots=True)
class _Rank:
    """One life of one rank: its file, and the tracks it has so far."""

    rank: int
    incarnation: int
    host: str
    pid: int
    path: Path
    epoch_ns: int
    """What every file begins with: a reader of many files wants clock readings that never fall."""
    tracks: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def uuid(self) -> int:
        """Of its process; its tracks' follow."""
        return (self.rank << 16 | self.incarnation) << 20 | 1

    def track(self, name: str, lane: int, made: list[bytes]) -> int:
        """Return the uuid of a track, described where it is new."""
        found = self.tracks.get((name, lane))
        if found is None:
            found = self.tracks[name, lane] = self.uuid + 1 + len(self.tracks)
            title = f"{name} {lane + 1}" if lane else name
            made.append(packets.track(found, self.uuid, title, _TRACKS.index(name) * 1000 + lane))
        return found

    def append(self, made: list[bytes]) -> None:
        if not self.path.exists():
            life = f" (life {self.incarnation})" if self.incarnation else ""
            head = packets.process(self.uuid, self.pid, f"rank {self.rank}{life}")
            made = [packets.clock(self.epoch_ns), head, *made]
        with self.path.open("ab") as file:
            file.writelines(made)


def write(
    trace: Trace,
    selection: Selection,
    place: ExportPlace,
    progress: Progress,
    *,
    max_events: int = MAX_EVENTS,
) -> Sequence[str]:
    """Write the archive; steps that would be too much for a viewer are left out, and named."""
    wanted = selection.ranks(trace)
    lives = _lives(trace, wanted, place.scratch)
    written, left = 0, list[str]()
    for step, nodes in selection.walk(trace, progress, "writing calls"):
        counts = _events(nodes, wanted)
        ranks = _fitting(counts, max_events - written) if not left else frozenset[int]()
        if len(ranks) < len(counts):
            name = step.head.label
            left.append(f"{name}, ranks {ranks_text(set(counts) - ranks)}" if ranks else name)
        for rank in _write_step(step, nodes, lives, ranks):
            written += counts[rank]
    if not written:
        raise SelectionError(
            f"a single rank's step has more than {max_events} events: narrow it with --path, "
            "--phase"
            if left
            else "the trace holds no call in what is asked for"
        )
    here = [life for life in lives.values() if life.path.exists()]
    progress("packing", 1.0)
    _pack(place.target, trace, here, left)
    return _said(written, here, left, max_events)


def _said(written: int, here: list[_Rank], left: list[str], limit: int) -> list[str]:
    lines = [
        f"{written} events of ranks {ranks_text(life.rank for life in here)}; open it in "
        "https://ui.perfetto.dev or trace_processor, v58.2 or newer for host names"
    ]
    if left:
        shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        lines.append(
            f"left out, beyond {limit} events: {shown}; choose with --step, --rank, --phase, --path"
        )
    hosts = {life.host for life in here}
    if len(hosts) > 1:
        lines.append(
            f"times are the wall clocks of {len(hosts)} hosts: they differ by what those differ"
        )
    return lines


def _lives(trace: Trace, wanted: frozenset[int], folder: Path) -> dict[tuple[int, int], _Rank]:
    """Return what becomes a process, by rank and incarnation."""
    lives = {}
    starts = (step.columns()["calls.start_ns"] for step in (*trace.setup, *trace.steps))
    epoch_ns = min((int(each.min()) for each in starts if len(each)), default=0)
    taken = set[tuple[str, int]]()
    for number, one in enumerate(trace.run["ranks"]):
        rank, incarnation = int(one["rank"]), int(one["incarnation"])
        host, pid = str(one["host"]) or "unknown host", int(one["pid"])
        if (host, pid) in taken or pid <= 0:  # containers of one host name count pids of their own
            pid = _FIRST_FREE_PID + number
        taken.add((host, pid))
        if rank in wanted:
            name = f"rank{rank:05d}" + (f".{incarnation}" if incarnation else "") + ".pftrace"
            lives[rank, incarnation] = _Rank(rank, incarnation, host, pid, folder / name, epoch_ns)
    return lives


def _events(nodes: Sequence[Node], wanted: frozenset[int]) -> Counter[int]:
    """Return how many events of each rank a step has: of its calls, its errors and itself."""
    counts: Counter[int] = Counter()
    for node in nodes:
        for rank in wanted.intersection(node.ranks):
            counts[rank] += 2
        for outcome in _troubles(node):
            for rank in wanted.intersection(outcome.ranks):
                counts[rank] += 1
    for rank in counts:
        counts[rank] += 2
    return counts


def _fitting(counts: Counter[int], room: int) -> frozenset[int]:
    """Return the lowest ranks whose events fit together."""
    fitting = []
    for rank in sorted(counts):
        room -= counts[rank]
        if room < 0:
            break
        fitting.append(rank)
    return frozenset(fitting)


def _troubles(node: Node) -> list[Any]:
    outcomes = () if node.has_returned else node.outcomes
    return [*(o for o in outcomes if o.status == CallStatus.RAISED.word), *node.errors]


def _write_step(
    step: Step, nodes: Sequence[Node], lives: dict[tuple[int, int], _Rank], ranks: frozenset[int]
) -> Iterator[int]:
    """Append a step to the files of its ranks; yield each rank that has it."""
    slices: dict[int, dict[str, list[Span[bytes]]]] = {rank: {} for rank in sorted(ranks)}
    instants: dict[int, list[tuple[int, bytes]]] = {rank: [] for rank in ranks}
    names = ("rank", "start_ns", "duration_ns", "status")
    for node in nodes if ranks else ():
        shared, phase = _call_content(step, node), node.phase.word
        results = _results(node, ranks)
        by_rank = ((rank, each) for each in _troubles(node) for rank in each.ranks)
        troubles = {(rank, each.status): each.error for rank, each in by_rank}
        rows = slice(*node.step.lists.first_call[node.row : node.row + 2])
        own = (node.step[f"calls.{name}"][rows].tolist() for name in names)
        for rank, start, duration, ended in zip(*own):
            if rank not in ranks:
                continue
            said = {"status": CallStatus.word_of(ended), **results.get(rank, {})}
            content = shared + packets.arguments("", "", said)
            end = math.inf if duration < 0 else start + duration
            slices[rank].setdefault(phase, []).append(Span(start, end, content))
            for status in (CallStatus.RAISED.word, "error"):
                if (rank, status) in troubles:
                    at = start if duration < 0 else start + duration
                    error = _trouble_content(node, status, troubles[rank, status])
                    instants[rank].append((at, error))
    for rank, found in slices.items():
        life = lives.get((rank, step.incarnation))
        if life is not None and found:
            life.append(_step_packets(step, life, found, instants[rank]))
            yield rank


def _step_packets(
    step: Step, life: _Rank, slices: dict[str, list[Span[bytes]]], instants: list[tuple[int, bytes]]
) -> list[bytes]:
    made: list[bytes] = []
    every = [span for spans in slices.values() for span in spans]
    track = life.track(_STEPS, 0, made)
    own: dict[str, packets.Argument] = {"step": step.step, "incarnation": step.incarnation}
    first = min(span.start for span in every)
    made.append(packets.begin(track, first, packets.arguments(step.head.words, "step", own)))
    last = max(span.start if span.end == math.inf else int(span.end) for span in every)
    made.append(packets.end(track, last))
    for phase, spans in slices.items():
        for edge in edges(spans):
            track = life.track(phase, edge.lane, made)
            if edge.begins is None:
                made.append(packets.end(track, edge.time))
            else:
                made.append(packets.begin(track, edge.time, edge.begins))
    for time_ns, content in instants:
        made.append(packets.instant(life.track(_ERRORS, 0, made), time_ns, content))
    return made


def _call_content(step: Step, node: Node) -> bytes:
    values: dict[str, packets.Argument] = {
        "path": node.path,
        "class": node.class_name,
        "step": step.step,
        "phase": node.phase.word,
        "ordinal": node.ordinal,
        "node": node.id,
    }
    if not step.is_setup:
        values["mode"] = step.mode.word
    if node.micro_batch is not None:
        values["micro_batch"] = node.micro_batch
    return packets.arguments(node.path or "(root)", node.phase.word, values)


def _trouble_content(node: Node, status: str, error: str) -> bytes:
    who = "rankscope failed" if status == "error" else status
    values: dict[str, packets.Argument] = {"path": node.path, "error": error}
    return packets.arguments(f"{who}: {node.path or '(root)'}", "error", values)


def _results(node: Node, ranks: frozenset[int]) -> dict[int, dict[str, packets.Argument]]:
    """Return what came out of a call on each rank, as arguments by slot."""
    stems = node.phase.facts.results
    found: dict[int, dict[str, packets.Argument]] = {}
    for slot in node.slots if stems else ():
        if slot.slot.partition(".")[0] not in stems:
            continue
        digests = slot.per_rank()
        placements = " ".join(f"{axis}={text}" for axis, text in slot.placements.items())
        for piece in slot.pieces:
            shared = {
                "dtype": slot.dtype,
                "shape": "x".join(map(str, piece.shape)) or "scalar",
                **({"placements": placements} if placements else {}),
                **({"flags": ",".join(piece.flags)} if piece.flags else {}),
            }
            for rank in ranks.intersection(piece.ranks):
                mine = found.setdefault(rank, {})
                if len(mine) < _MAX_RESULTS:
                    mine[slot.slot] = shared | _numbers(digests[rank])
    return found


def _numbers(digest: Digest | None) -> dict[str, packets.Argument]:
    if digest is None:
        return {}
    numbers = {name: digest.number(name) for name in numbers_with_first("mean", "std")}
    return {
        **{name: value for name, value in numbers.items() if not math.isnan(value)},
        **{name: digest.number(name) for name in (*COUNTS[1:], *COUNTS[:1])},
        "hash": f"{digest.hash:016x}",
    }


def _pack(target: Path, trace: Trace, here: list[_Rank], left: list[str]) -> None:
    """Put the ranks' files and the manifest into one archive; the files go as they are packed."""
    attributes: dict[str, str] = {
        "rankscope.run": str(trace.run["id"]),
        "rankscope.complete": "true" if trace.is_complete else "false",
    }
    if left:
        attributes["rankscope.left_out"] = "; ".join(left)
    manifest = {
        "perfetto_manifest": {
            "version": 1,
            "trace_time": {"clock": "REALTIME", "file": here[0].path.name},
            "files": [{"path": life.path.name, "machine": {"name": life.host}} for life in here],
            "attributes": attributes,
        }
    }
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("perfetto_manifest.json", json.dumps(manifest))
        for life in here:
            archive.write(life.path, life.path.name)
            life.path.unlink()
