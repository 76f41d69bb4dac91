"""`--format perfetto`: the calls of all ranks on one clock, for ui.perfetto.dev and its SQL.

A ZIP of one Perfetto trace per rank and life, and a manifest that says which host each is from and
that wall-clock time is the clock of all. On every rank the steps are one track, and each phase has
tracks of its own. The events of a step are in memory, the ranks' files grow beside the export.

The few messages of Perfetto's format that this needs are written by hand. Fields are numbered as in
perfetto's protos/perfetto/trace/*.proto, whose numbers never change.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from rankscope.errors import SelectionError
from rankscope.export.formats import ExportPlace, Selection
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.record.statistics import COUNTS, numbers_with_first
from rankscope.record.value import Digest
from rankscope.run.folders import Progress
from rankscope.tree.views import Node, Step, Trace

Argument = bool | int | float | str | Mapping[str, "Argument"]
_REALTIME = 1
_SEQUENCE = 1
_EXPLICIT = 3
"""Tracks of a process in the order of their ranks, not by name."""
_VARINT, _FIXED64, _BYTES = 0, 1, 2
_BEGIN, _END, _INSTANT = 1, 2, 3
"""Kinds of events: a slice begins, the innermost slice of its track ends, no duration."""


def _clock_packet(time_ns: int) -> bytes:
    """Return the packet that makes wall-clock time the time of the file."""
    reading = _number_field(1, _REALTIME) + _number_field(2, time_ns)
    return _packet(_bytes_field(6, _bytes_field(1, reading) + _number_field(2, _REALTIME)))


def _process_packet(uuid: int, pid: int, name: str) -> bytes:
    """Return the packet that describes a process."""
    described = _number_field(1, pid) + _bytes_field(6, _text(name))
    return _packet(
        _bytes_field(
            60, _number_field(1, uuid) + _bytes_field(3, described) + _number_field(11, _EXPLICIT)
        )
    )


def _track_packet(uuid: int, parent: int, name: str, place: int) -> bytes:
    """Return the packet that describes a track of a process."""
    described = _number_field(1, uuid) + _bytes_field(2, _text(name)) + _number_field(5, parent)
    return _packet(_bytes_field(60, described + _number_field(12, place)))


def _arguments(name: str, category: str, values: Mapping[str, Argument]) -> bytes:
    """Return the content of an event; behind it further arguments may be appended, made the same
    way with empty name and category."""
    head = _bytes_field(23, _text(name)) if name else b""
    head += _bytes_field(22, _text(category)) if category else b""
    return head + b"".join(_bytes_field(4, _argument(key, value)) for key, value in values.items())


def _argument(name: str, value: Argument) -> bytes:
    head = _bytes_field(10, _text(name))
    if isinstance(value, bool):
        return head + _number_field(2, int(value))
    if isinstance(value, int):
        return head + _number_field(4, value)
    if isinstance(value, float):
        return head + _varint(5 << 3 | _FIXED64) + struct.pack("<d", value)
    if isinstance(value, str):
        return head + _bytes_field(6, _text(value))
    return head + b"".join(_bytes_field(11, _argument(key, item)) for key, item in value.items())


def _event(uuid: int, time_ns: int, kind: int, content: bytes) -> bytes:
    event = _bytes_field(11, _number_field(9, kind) + _number_field(11, uuid) + content)
    return _packet(_number_field(8, time_ns) + _number_field(58, _REALTIME) + event)


def _packet(body: bytes) -> bytes:
    return _bytes_field(1, body + _number_field(10, _SEQUENCE))


def _text(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _bytes_field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(content)) + content


def _number_field(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


T = TypeVar("T")


class Span(NamedTuple, Generic[T]):
    """One call."""

    start: int
    end: float
    """math.inf where its end was not recorded."""
    content: T


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
        yield SliceEdge(lane, span.start, span.content)
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

    def track(self, name: str, lane: int, packets: list[bytes]) -> int:
        """Return the uuid of a track, described where it is new."""
        uuid = self.tracks.get((name, lane))
        if uuid is None:
            uuid = self.tracks[name, lane] = self.uuid + 1 + len(self.tracks)
            title = f"{name} {lane + 1}" if lane else name
            packets.append(_track_packet(uuid, self.uuid, title, _TRACKS.index(name) * 1000 + lane))
        return uuid

    def append(self, packets: list[bytes]) -> None:
        if not self.path.exists():
            life = f" (life {self.incarnation})" if self.incarnation else ""
            head = _process_packet(self.uuid, self.pid, f"rank {self.rank}{life}")
            packets = [_clock_packet(self.epoch_ns), head, *packets]
        with self.path.open("ab") as file:
            file.writelines(packets)


def write(
    trace: Trace,
    selection: Selection,
    place: ExportPlace,
    progress: Progress,
    *,
    max_events: int = MAX_EVENTS,
) -> Sequence[str]:
    """Write the archive; steps that would be too much for a viewer are left out, and named."""
    ranks_chosen = selection.ranks(trace)
    lives = _lives(trace, ranks_chosen, place.scratch)
    written, left_out = 0, list[str]()
    for step, nodes in selection.walk(trace, progress, "writing calls"):
        counts = _events(nodes, ranks_chosen)
        ranks = _fitting(counts, max_events - written) if not left_out else frozenset[int]()
        if len(ranks) < len(counts):
            name = step.head.label
            left_out.append(f"{name}, ranks {ranks_text(set(counts) - ranks)}" if ranks else name)
        for rank in _write_step(step, nodes, lives, ranks):
            written += counts[rank]
    if not written:
        raise SelectionError(
            f"a single rank's step has more than {max_events} events: narrow it with --path, "
            "--phase"
            if left_out
            else "the trace holds no call in what is asked for"
        )
    lives_written = [life for life in lives.values() if life.path.exists()]
    progress("packing", 1.0)
    _pack(place.target, trace, lives_written, left_out)
    return _said(written, lives_written, left_out, max_events)


def _said(written: int, lives: list[_Rank], omitted: list[str], limit: int) -> list[str]:
    lines = [
        f"{written} events of ranks {ranks_text(life.rank for life in lives)}; open it in "
        "https://ui.perfetto.dev or trace_processor, v58.2 or newer for host names"
    ]
    if omitted:
        listed = ", ".join(omitted[:5]) + (
            f" and {len(omitted) - 5} more" if len(omitted) > 5 else ""
        )
        lines.append(
            f"left out, beyond {limit} events: {listed}; choose with "
            "--step, --rank, --phase, --path"
        )
    hosts = {life.host for life in lives}
    if len(hosts) > 1:
        lines.append(
            f"times are the wall clocks of {len(hosts)} hosts: they differ by what those differ"
        )
    return lines


def _lives(trace: Trace, chosen: frozenset[int], folder: Path) -> dict[tuple[int, int], _Rank]:
    """Return what becomes a process, by rank and incarnation."""
    lives = {}
    starts = (step.columns()["calls.start_ns"] for step in (*trace.setup, *trace.steps))
    epoch_ns = min((int(column.min()) for column in starts if len(column)), default=0)
    processes = set[tuple[str, int]]()
    for number, life in enumerate(trace.run["ranks"]):
        rank, incarnation = int(life["rank"]), int(life["incarnation"])
        host, pid = str(life["host"]) or "unknown host", int(life["pid"])
        if (
            host,
            pid,
        ) in processes or pid <= 0:  # containers of one host name count pids of their own
            pid = _FIRST_FREE_PID + number
        processes.add((host, pid))
        if rank in chosen:
            name = f"rank{rank:05d}" + (f".{incarnation}" if incarnation else "") + ".pftrace"
            lives[rank, incarnation] = _Rank(rank, incarnation, host, pid, folder / name, epoch_ns)
    return lives


def _events(nodes: Sequence[Node], ranks_chosen: frozenset[int]) -> Counter[int]:
    """Return how many events of each rank a step has: of its calls, its errors and itself."""
    counts: Counter[int] = Counter()
    for node in nodes:
        for rank in ranks_chosen.intersection(node.ranks):
            counts[rank] += 2
        for outcome in _troubles(node):
            for rank in ranks_chosen.intersection(outcome.ranks):
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
        by_rank = ((rank, trouble) for trouble in _troubles(node) for rank in trouble.ranks)
        troubles = {(rank, trouble.status): trouble.error for rank, trouble in by_rank}
        rows = slice(*node.step.lists.first_call[node.row : node.row + 2])
        columns = (node.step[f"calls.{name}"][rows].tolist() for name in names)
        for rank, start, duration, ended in zip(*columns):
            if rank not in ranks:
                continue
            outcome = {"status": CallStatus.word_of(ended), **results.get(rank, {})}
            content = shared + _arguments("", "", outcome)
            end = math.inf if duration < 0 else start + duration
            slices[rank].setdefault(phase, []).append(Span(start, end, content))
            for status in (CallStatus.RAISED.word, "error"):
                if (rank, status) in troubles:
                    at = start if duration < 0 else start + duration
                    error = _trouble_content(node, status, troubles[rank, status])
                    instants[rank].append((at, error))
    for rank, spans_of_phase in slices.items():
        life = lives.get((rank, step.incarnation))
        if life is not None and spans_of_phase:
            life.append(_step_packets(step, life, spans_of_phase, instants[rank]))
            yield rank


def _step_packets(
    step: Step, life: _Rank, slices: dict[str, list[Span[bytes]]], instants: list[tuple[int, bytes]]
) -> list[bytes]:
    packets: list[bytes] = []
    all_spans = [span for spans in slices.values() for span in spans]
    track = life.track(_STEPS, 0, packets)
    fields: dict[str, Argument] = {"step": step.step, "incarnation": step.incarnation}
    first = min(span.start for span in all_spans)
    packets.append(_event(track, first, _BEGIN, _arguments(step.head.words, "step", fields)))
    last = max(span.start if span.end == math.inf else int(span.end) for span in all_spans)
    packets.append(_event(track, last, _END, b""))
    for phase, spans in slices.items():
        for edge in edges(spans):
            track = life.track(phase, edge.lane, packets)
            if edge.begins is None:
                packets.append(_event(track, edge.time, _END, b""))
            else:
                packets.append(_event(track, edge.time, _BEGIN, edge.begins))
    for time_ns, content in instants:
        packets.append(_event(life.track(_ERRORS, 0, packets), time_ns, _INSTANT, content))
    return packets


def _call_content(step: Step, node: Node) -> bytes:
    values: dict[str, Argument] = {
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
    return _arguments(node.path or "(root)", node.phase.word, values)


def _trouble_content(node: Node, status: str, error: str) -> bytes:
    title = "rankscope failed" if status == "error" else status
    values: dict[str, Argument] = {"path": node.path, "error": error}
    return _arguments(f"{title}: {node.path or '(root)'}", "error", values)


def _results(node: Node, ranks: frozenset[int]) -> dict[int, dict[str, Argument]]:
    """Return what came out of a call on each rank, as arguments by slot."""
    stems = node.phase.facts.results
    results_of: dict[int, dict[str, Argument]] = {}
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
                rank_results = results_of.setdefault(rank, {})
                if len(rank_results) < _MAX_RESULTS:
                    rank_results[slot.slot] = shared | _numbers(digests[rank])
    return results_of


def _numbers(digest: Digest | None) -> dict[str, Argument]:
    if digest is None:
        return {}
    numbers = {name: digest.number(name) for name in numbers_with_first("mean", "std")}
    return {
        **{name: value for name, value in numbers.items() if not math.isnan(value)},
        **{name: digest.number(name) for name in (*COUNTS[1:], *COUNTS[:1])},
        "hash": f"{digest.hash:016x}",
    }


def _pack(target: Path, trace: Trace, lives: list[_Rank], omitted: list[str]) -> None:
    """Put the ranks' files and the manifest into one archive; the files go as they are packed."""
    attributes: dict[str, str] = {
        "rankscope.run": str(trace.run["id"]),
        "rankscope.complete": "true" if trace.is_complete else "false",
    }
    if omitted:
        attributes["rankscope.left_out"] = "; ".join(omitted)
    manifest = {
        "perfetto_manifest": {
            "version": 1,
            "trace_time": {"clock": "REALTIME", "file": lives[0].path.name},
            "files": [{"path": life.path.name, "machine": {"name": life.host}} for life in lives],
            "attributes": attributes,
        }
    }
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("perfetto_manifest.json", json.dumps(manifest))
        for life in lives:
            archive.write(life.path, life.path.name)
            life.path.unlink()
