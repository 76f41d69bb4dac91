"""Where each rank of a running job is, whom it waits for, how fast it is, what its spool holds.

It is made of what was read of the job, and written into `status.json` again and again.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from rankscope.companion.running.runningjob import RunningJob
from rankscope.companion.running.splitstream import EnteredCall, SplitStream, StepKey, StreamTail
from rankscope.errors import SpoolError
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import MESSAGES, EndReason, RankPlace, StreamId, step_label
from rankscope.run.folders import find_runs, stream_folder, streams
from rankscope.run.jobstatus import JobStatus, JobTotals, RankStatus, write_status
from rankscope.run.processes import is_alive
from rankscope.spool.recordcolumns import StreamReader
from rankscope.tree.assembly.interning import join_path, name_roots, roots_of
from rankscope.tree.reader import spool_bases

_EVERY_S: Final = 1.0
_SHARE: Final = 4
"""Writing it may take a fourth of the time."""
_RATE_S: Final = 5.0
_FIND_S: Final = 5.0
_QUIET_S: Final = 3.0
"""A rank that has written nothing for that long stands in its asynchronous collective too."""
_SLOW: Final = 1.1
_NOWHERE: Final = (-1, -1)


class StatusWriter:
    """Writes the status of one job (a `Listener`)."""

    def __init__(self, job: RunningJob, out: Path) -> None:
        self._job, self._out = job, out
        self._spools: dict[StreamId, StreamReader] = {}
        self._written_to: dict[StreamId, int] = {}
        self._run_folders: list[Path] = []
        self._found_at = float("-inf")
        self._due_at = float("-inf")
        self._rates: deque[tuple[float, int]] = deque()
        self._root_count = -1
        self._roots: dict[int, dict[int, str]] = {}
        self._streams: dict[int, SplitStream] = {}
        """Of each rank its last life."""

    def look(self, is_stopped: Callable[[], bool]) -> None:
        """Write the status where that is due."""
        began = time.monotonic()
        if began < self._due_at:
            return
        with contextlib.suppress(SpoolError):  # a full disk: tried again
            write_status(self._out, self.status())
        now = time.monotonic()
        self._due_at = began + max(_EVERY_S, _SHARE * (now - began))

    def needs(self, key: StepKey) -> bool:
        """Return False: what it knows is kept apart."""
        return False

    def status(self) -> JobStatus:
        """Return the status of the job as far as it was read."""
        self._streams = dict(sorted((stream.stream.rank, stream) for stream in self._job.streams))
        identities = (stream.tail.identity for stream in self._streams.values())
        identity = next(filter(None, identities), {})
        settings = identity.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        run = {"id": str(identity.get("run_id", "")), "settings": settings}
        self._find_spools(run)
        return JobStatus(
            run=run,
            world_size=int(identity.get("world_size", 0)),
            written_ns=time.time_ns(),
            totals=self._totals(),
            ranks=self._ranks(),
        )

    def _totals(self) -> JobTotals:
        streams = self._job.streams
        steps = Counter[int]()
        for stream in streams:
            steps[stream.stream.rank] += stream.tail.steps_ended
        lengths = self._job.lengths
        now, received = time.monotonic(), sum(lengths.values())
        records = sum(stream.tail.records for stream in streams)
        self._rates.append((now, received))
        while len(self._rates) > 2 and now - self._rates[1][0] >= _RATE_S:
            self._rates.popleft()
        (began, before), (ended, after) = self._rates[0], self._rates[-1]
        rate = (after - before) / max(ended - began, 1e-3) if len(self._rates) > 1 else None
        read = sum(stream.offset for stream in streams)
        return JobTotals(
            records=records,
            received_bytes=received,
            lost_records=sum(stream.tail.lost_records for stream in streams),
            steps_ended=max(steps.values(), default=0),
            unread_bytes=sum(
                max(0, lengths.get(stream.stream, 0) - stream.offset)
                for stream in self._streams.values()
            ),
            bytes_per_s=rate,
            records_per_s=None if rate is None else rate * records / max(read, 1),
        )

    def _ranks(self) -> tuple[RankStatus, ...]:
        self._name_roots()
        statuses = {rank: self._status(rank) for rank in self._streams}
        for rank, members in self._waits(statuses).items():
            statuses[rank] = replace(statuses[rank], waits_for=members)
        medians = _medians(statuses.values())
        return tuple(_compared(status, medians) for status in statuses.values())

    def _find_spools(self, run: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if run["id"] and not self._run_folders and now - self._found_at >= _FIND_S:
            self._found_at = now
            self._run_folders = find_runs(spool_bases(run), run["id"])
        for run_folder in self._run_folders:
            with contextlib.suppress(SpoolError):  # it went with its run
                for stream in {*streams(run_folder)} - self._spools.keys():
                    self._spools[stream] = StreamReader(stream_folder(run_folder, stream))

    def _name_roots(self) -> None:
        tails = [(rank, stream.tail.definitions) for rank, stream in self._streams.items()]
        # definitions only grow: their number tells whether there is anything new to name
        count = sum(len(definitions) for _, definitions in tails)
        if count != self._root_count:
            self._root_count = count
            names = name_roots([roots_of(definitions) for _, definitions in tails])
            self._roots = {rank: root_names for (rank, _), root_names in zip(tails, names)}

    def _status(self, rank: int) -> RankStatus:
        split = self._streams[rank]
        tail, stream = split.tail, split.stream
        identity, end = tail.identity, self._end(split)
        record_ns = _wall_ns(tail)
        age_s = (time.time_ns() - record_ns) / 1e9 if record_ns else 0.0
        call = tail.innermost or tail.latest
        standing = _standing(tail, age_s) if end != EndReason.EXIT.value else None
        last = tail.ended[-1] if tail.ended else None
        earlier = [step.seconds for step in list(tail.ended)[:-1]]
        in_step = tail.running or (None if call is None else call.step_key)
        limit = _whole_number(identity.get("settings"), "spool-bytes")
        written = self._written(stream)
        unsent = None
        if written is not None:
            unsent = max(0, written - self._job.lengths.get(stream, 0))
        return RankStatus(
            rank=rank,
            incarnation=stream.incarnation,
            host=str(identity.get("host", "")),
            place=self._place(rank, end, call, standing),
            is_step_over=tail.running is None and in_step is not None,
            mode=Mode.TRAIN if in_step is None else Mode(in_step[0]),
            step=None if in_step is None else in_step[1],
            record_ns=record_ns,
            step_s=None if last is None else last.seconds,
            own_s=None if last is None else last.own_s,
            beside_history=last.seconds / max(median(earlier), 1e-9) if last and earlier else None,
            ended=tuple(tail.ended),
            missed=tuple(tail.missed),
            lost_records=tail.lost_records,
            unsent_bytes=unsent,
            spool_fill=unsent / limit if unsent is not None and limit else None,
        )

    def _place(
        self, rank: int, end: str, call: EnteredCall | None, standing: EnteredCall | None
    ) -> RankPlace:
        if call is None:
            return RankPlace(end=end)
        split = self._streams[rank]
        definitions = split.tail.definitions
        module = definitions.get(call.module, {})
        root = self._roots.get(rank, {}).get(int(module.get("root", 0)), "")
        kind = {} if standing is None else definitions.get(standing.collective, {})
        phase = Phase(call.phase) if call.phase in Phase._value2member_map_ else None
        return RankPlace(
            end=end,
            step=step_label(
                Mode(call.mode), call.step, split.stream.incarnation, is_setup=phase is Phase.SETUP
            ),
            phase=phase,
            path=join_path(root, str(module.get("path", ""))) if module else "?",
            op="" if standing is None else str(kind.get("op", "collective")),
            members=tuple(map(int, kind.get("members", ()))),
        )

    def _end(self, split: SplitStream) -> str:
        if split.tail.end is not None:
            return split.tail.end.value
        marker = self._job.end_of(split.stream)
        if marker is not None:
            return marker.end.value
        spool = self._spools.get(split.stream)
        if spool is None or not spool.folder.is_dir() or is_alive(spool.folder):
            return EndReason.RUNNING.value
        with contextlib.suppress(SpoolError):
            reason = spool.end_reason(self._written(split.stream) or 0)
            return (reason or EndReason.LOST).value
        return EndReason.LOST.value

    def _written(self, stream: StreamId) -> int | None:
        spool = self._spools.get(stream)
        if spool is None:
            return None
        least = self._job.lengths.get(stream, 0)
        with contextlib.suppress(SpoolError):  # what was read by the last look is not read again
            floor = max(spool.lowest(), least, self._written_to.get(stream, 0))
            self._written_to[stream] = least = spool.committed(floor)
        spool.close()
        return least

    def _waits(self, statuses: Mapping[int, RankStatus]) -> dict[int, tuple[int, ...]]:
        """Return {rank: who did not come to the collective in which it stands}."""
        waits: dict[int, tuple[int, ...]] = {}
        came = {rank: _came_to(stream.tail) for rank, stream in self._streams.items()}
        for rank, status in statuses.items():
            tail = self._streams[rank].tail
            call = _standing(tail, status.age_s or 0.0) if status.place.op else None
            if call is None:
                continue
            kind = tail.definitions.get(call.collective, {})
            if kind.get("op") in MESSAGES:
                peer = kind.get("peer")
                waits[rank] = (peer,) if isinstance(peer, int) and peer >= 0 else ()
                continue
            channel, place = _channel(kind, call), (call.step, call.number)
            waits[rank] = tuple(
                member
                for member in sorted(status.place.members)
                if member in came and came[member].get(channel, _NOWHERE) < place
            )
        return waits


Channel = tuple[str, tuple[int, ...], int]


def _channel(kind: Mapping[str, Any], call: EnteredCall) -> Channel:
    members = tuple(sorted(map(int, kind.get("members", ()))))
    return str(kind.get("group", "")), members, call.mode


def _came_to(tail: StreamTail) -> dict[Channel, tuple[int, int]]:
    places: dict[Channel, tuple[int, int]] = {}
    for number, call in tail.issued.items():
        kind = tail.definitions.get(number, {})
        if kind and kind.get("op") not in MESSAGES:
            channel = _channel(kind, call)
            places[channel] = max(places.get(channel, _NOWHERE), (call.step, call.number))
    return places


def _standing(tail: StreamTail, age_s: float) -> EnteredCall | None:
    """Return the collective in which a rank stands whose last record is so old."""
    issued = [call for call in tail.open.values() if call.collective]
    waited = [call for call in issued if tail.is_synchronous(call)]
    return next(iter(waited or (issued if age_s >= _QUIET_S else [])), None)


def _wall_ns(tail: StreamTail) -> int:
    """Return the wall clock of the last record; 0 where that is not known."""
    identity = tail.identity
    if not (tail.written_ns and identity.get("wall_ns")):
        return 0
    return tail.written_ns + int(identity["wall_ns"]) - int(identity.get("monotonic_ns", 0))


def _whole_number(settings: object, name: str) -> int | None:
    text = settings.get(name) if isinstance(settings, dict) else None
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 20 else None


def _medians(statuses: Any) -> dict[int, float]:
    """Return {step: median of `own_s`} of steps that two ranks or more have ended."""
    seconds: dict[int, list[float]] = {}
    for status in statuses:
        for step in status.ended:
            seconds.setdefault(step.step, []).append(step.own_s)
    return {step: median(times) for step, times in seconds.items() if len(times) > 1}


def _compared(status: RankStatus, medians: Mapping[int, float]) -> RankStatus:
    pairs = [(step.own_s, medians[step.step]) for step in status.ended if step.step in medians]
    if not pairs:
        return status
    last = status.ended[-1]
    return replace(
        status,
        beside_all=last.own_s / max(medians[last.step], 1e-9) if last.step in medians else None,
        slow_steps=sum(own_s > _SLOW * middle for own_s, middle in pairs),
        compared_steps=len(pairs),
    )
