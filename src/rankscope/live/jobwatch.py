"""A running job, looked at again and again from its trace folder: where each rank is, whom it waits
for, how fast it is, what its spool holds.

A look reads what is new at the end of each stream, and keeps a small state of each. What it costs
does not depend on how long the job has run.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from rankscope.assembly.interning import roots_of
from rankscope.assembly.rootnames import join_path, name_roots
from rankscope.errors import SpoolError
from rankscope.live.streamfollower import StreamFollower
from rankscope.live.streamtail import EndedStep, EnteredCall, StreamTail
from rankscope.record.call import Mode
from rankscope.record.collective import MESSAGES
from rankscope.record.phases import Phase
from rankscope.record.rankplace import RankPlace, step_label
from rankscope.record.streams import EndReason, StreamId
from rankscope.run.folders import find_runs, stream_folder, streams
from rankscope.run.locks import is_alive
from rankscope.spool.definitions import Decoded
from rankscope.spool.replication import read_end, replica_path, replicated
from rankscope.spool.streamreader import StreamReader
from rankscope.tree.unfinished import spool_bases

__all__ = ["JobTotals", "JobWatch", "RankStatus"]

_MOST_BYTES: Final = 128 << 20
"""Read in one look, of all streams together."""
_LEAST_BYTES, _STREAM_BYTES = 256 << 10, 8 << 20
"""Of one stream."""
_NAMES_SHARE: Final = 4
"""How much more of a stream than of its end a look reads for definitions that were passed over."""
_RATE_S: Final = 5.0
_FIND_S: Final = 5.0
_QUIET_S: Final = 3.0
"""A rank that has written nothing for that long stands in its asynchronous collective too."""
_SLOW: Final = 1.1
_NOWHERE: Final = (-1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank as far as it was read. Times in seconds; None where a number is not known."""

    rank: int
    incarnation: int = 0
    host: str
    place: RankPlace
    is_step_over: bool = False
    """The step it was in last has ended: it is between traced steps."""
    mode: Mode = Mode.TRAIN
    step: int | None = None
    """The last step it was in."""
    age_s: float | None = None
    """Since its last record."""
    waits_for: tuple[int, ...] = ()
    """Ranks that did not come to the collective in which it stands."""
    step_s: float | None = None
    """What its last train step that ended took."""
    own_s: float | None = None
    """Of that outside collectives for which it waited."""
    beside_all: float | None = None
    """`own_s` divided by the median of all ranks in the same step."""
    beside_history: float | None = None
    """`step_s` divided by the median of its earlier steps."""
    slow_steps: int = 0
    """Of its last steps those in which `own_s` was 10 % above the median of all ranks."""
    compared_steps: int = 0
    ended: tuple[EndedStep, ...] = ()
    missed: tuple[tuple[Mode, int], ...] = ()
    """The last steps that it was asked for too late."""
    lost_records: int = 0
    unsent_bytes: int | None = None
    """In the spool of this host, not in the trace folder yet; None where its spool is elsewhere."""
    spool_fill: float | None = None
    """Part of `--rs-spool-bytes` that these take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """What was read since the job began, or this watch of it. Earlier lives of ranks count too."""

    records: int = 0
    received_bytes: int = 0
    """In the trace folder."""
    lost_records: int = 0
    steps_ended: int = 0
    """Traced train steps, of the rank that has ended most."""
    unread_bytes: int = 0
    """In the trace folder and not read yet."""
    bytes_per_s: float | None = None
    """What came in between the last looks; None before the second."""
    records_per_s: float | None = None


class JobWatch:
    """The streams of one trace folder."""

    def __init__(self, out: Path, *, skips: bool = True, has_values: bool = True) -> None:
        """Look at nothing yet; arguments as of `StreamFollower`."""
        self._out = out
        self._skips, self._has_values = skips, has_values
        self._decoded: Decoded = {}
        self._followers: dict[int, StreamFollower] = {}
        self._replaced: list[StreamFollower] = []
        """Of earlier lives."""
        self._spools: dict[StreamId, StreamReader] = {}
        """Of this host."""
        self._written_to: dict[StreamId, int] = {}
        """How far each of them was known to be written."""
        self._run_folders: list[Path] = []
        self._found_at = float("-inf")
        self._rates: deque[tuple[float, int]] = deque()
        self._share = _LEAST_BYTES
        self._root_count = -1
        self._roots: dict[int, dict[int, str]] = {}

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the lowest rank of which anything is known says of itself and of the job."""
        known = (f.tail.identity for _, f in sorted(self._followers.items()))
        return next((identity for identity in known if identity), {})

    @property
    def run(self) -> dict[str, Any]:
        """`id` and `settings` of the job, as the head of a trace has them."""
        identity = self.identity
        settings = identity.get("settings")
        return {
            "id": str(identity.get("run_id", "")),
            "settings": settings if isinstance(settings, dict) else {},
        }

    @property
    def world_size(self) -> int:
        """Ranks of the job; 0 while nothing is known."""
        return int(self.identity.get("world_size", 0))

    @property
    def has_skipped(self) -> bool:
        """True where not every record was read: what was lost before is not counted."""
        return any(follower.has_skipped for follower in self._followers.values())

    def look(self) -> None:
        """Read what is new."""
        self._discover()
        share = _MOST_BYTES // max(1, len(self._followers))
        self._share = min(max(share, _LEAST_BYTES), _STREAM_BYTES)
        for follower in self._followers.values():
            with contextlib.suppress(SpoolError):  # the next look tries again
                follower.look(self._share)
                if not follower.knows_a_step:  # the next look goes on
                    follower.define(_NAMES_SHARE * self._share)
        now = time.monotonic()
        self._rates.append((now, sum(f.read_bytes for f in self._followers.values())))
        while len(self._rates) > 2 and now - self._rates[1][0] >= _RATE_S:
            self._rates.popleft()

    def totals(self) -> JobTotals:
        """Return what was read so far."""
        every = [*self._replaced, *self._followers.values()]
        steps: dict[int, int] = {}
        for each in every:
            rank = each.stream.rank
            steps[rank] = steps.get(rank, 0) + each.tail.steps_ended
        records = sum(each.tail.records for each in every)
        rate = None
        if len(self._rates) > 1:
            (began, before), (ended, after) = self._rates[0], self._rates[-1]
            rate = (after - before) / max(ended - began, 1e-3)
        taken = sum(each.taken_bytes for each in every)
        return JobTotals(
            records=records,
            received_bytes=sum(each.replica_bytes for each in every),
            lost_records=sum(each.tail.lost_records for each in every),
            steps_ended=max(steps.values(), default=0),
            unread_bytes=sum(max(0, each.replica_bytes - each.read_bytes) for each in every),
            bytes_per_s=rate,
            records_per_s=None if rate is None else rate * records / max(taken, 1),
        )

    def ranks(self) -> list[RankStatus]:
        """Return every rank that has written anything, its last life, lowest first."""
        self._name_roots()
        places = {rank: self._status(rank) for rank in sorted(self._followers)}
        waits = self._waits(places)
        medians = _medians(places.values())
        return [
            _compared(replace(status, waits_for=waits.get(rank, ())), medians)
            for rank, status in places.items()
        ]

    def close(self) -> None:
        """Close what is open."""
        for spool in self._spools.values():
            spool.close()

    # ---- finding streams --------------------------------------------------------------------

    def _discover(self) -> None:
        found = set(replicated(self._out))
        own: dict[StreamId, Path] = {}
        now = time.monotonic()
        if self.identity and not self._run_folders and now - self._found_at >= _FIND_S:
            self._found_at = now
            run = self.run
            self._run_folders = find_runs(spool_bases(run), run["id"]) if run["id"] else []
        for run_folder in self._run_folders:
            with contextlib.suppress(SpoolError):  # it went with its run
                own |= {one: stream_folder(run_folder, one) for one in streams(run_folder)}
        for stream in sorted(found | set(own)):
            known = self._followers.get(stream.rank)
            if known is None or known.stream < stream:
                if known is not None:
                    self._replaced.append(known)
                    if known.stream in self._spools:  # nobody asks it any more
                        self._spools[known.stream].close()
                self._followers[stream.rank] = StreamFollower(
                    self._out,
                    stream,
                    skips=self._skips,
                    has_values=self._has_values,
                    decoded=self._decoded,
                )
        for stream in own.keys() - self._spools.keys():
            self._spools[stream] = StreamReader(own[stream])

    def _name_roots(self) -> None:
        tails = [(rank, f.tail.definitions) for rank, f in sorted(self._followers.items())]
        count = sum(len(definitions) for _, definitions in tails)
        if count != self._root_count:
            self._root_count = count
            names = name_roots([roots_of(definitions) for _, definitions in tails])
            self._roots = {rank: own for (rank, _), own in zip(tails, names)}

    # ---- one rank ---------------------------------------------------------------------------

    def _status(self, rank: int) -> RankStatus:
        follower = self._followers[rank]
        tail, stream = follower.tail, follower.stream
        identity = tail.identity
        host = str(identity.get("host", ""))
        end = self._end(follower)
        age_s = _age_s(tail)
        call = tail.innermost or tail.latest
        standing = _standing(tail, age_s or 0.0) if end != EndReason.EXIT.value else None
        last = tail.ended[-1] if tail.ended else None
        earlier = [each.seconds for each in list(tail.ended)[:-1]]
        in_step = tail.running or (None if call is None else call.step_key)
        limit = _whole_number(identity.get("settings"), "spool-bytes")
        written = self._written(follower)
        unsent = None if written is None else max(0, written - follower.replica_bytes)
        return RankStatus(
            rank=rank,
            incarnation=stream.incarnation,
            host=host,
            place=self._place(rank, end, call, standing),
            is_step_over=tail.running is None and in_step is not None,
            mode=Mode.TRAIN if in_step is None else Mode(in_step[0]),
            step=None if in_step is None else in_step[1],
            age_s=age_s,
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
        follower = self._followers[rank]
        definitions = follower.tail.definitions
        module = definitions.get(call.module, {})
        root = self._roots.get(rank, {}).get(int(module.get("root", 0)), "")
        kind = {} if standing is None else definitions.get(standing.collective, {})
        phase = Phase(call.phase) if call.phase in Phase._value2member_map_ else None
        return RankPlace(
            end=end,
            step=step_label(
                Mode(call.mode),
                call.step,
                follower.stream.incarnation,
                is_setup=phase is Phase.SETUP,
            ),
            phase=phase,
            path=join_path(root, str(module.get("path", ""))) if module else "?",
            op="" if standing is None else str(kind.get("op", "collective")),
            members=tuple(map(int, kind.get("members", ()))),
        )

    def _end(self, follower: StreamFollower) -> str:
        """Return how the stream ended, as an `EndReason`'s value."""
        if follower.tail.end is not None:
            return follower.tail.end.value
        marker = read_end(replica_path(self._out, follower.stream))
        if marker is not None:
            return marker.end.value
        spool = self._spools.get(follower.stream)
        if spool is None or not spool.folder.is_dir() or is_alive(spool.folder):
            return EndReason.RUNNING.value
        with contextlib.suppress(SpoolError):
            return (spool.end_reason(self._written(follower) or 0) or EndReason.LOST).value
        return EndReason.LOST.value

    def _written(self, follower: StreamFollower) -> int | None:
        """Return how many bytes the rank has written; None where its spool is elsewhere."""
        stream, least = follower.stream, follower.replica_bytes
        spool = self._spools.get(stream)
        if spool is None:
            return None
        with contextlib.suppress(SpoolError):  # what was read by the last look is not read again
            known = max(spool.lowest(), least, self._written_to.get(stream, 0))
            self._written_to[stream] = least = spool.committed(known)
        return least

    # ---- who waits for whom -----------------------------------------------------------------

    def _waits(self, statuses: Mapping[int, RankStatus]) -> dict[int, tuple[int, ...]]:
        """Return {rank: who did not come to the collective in which it stands}."""
        found: dict[int, tuple[int, ...]] = {}
        came = {rank: _came_to(f.tail) for rank, f in self._followers.items()}
        for rank, status in statuses.items():
            tail = self._followers[rank].tail
            call = _standing(tail, status.age_s or 0.0) if status.place.op else None
            if call is None:
                continue
            kind = tail.definitions.get(call.collective, {})
            if kind.get("op") in MESSAGES:
                peer = kind.get("peer")
                found[rank] = (peer,) if isinstance(peer, int) and peer >= 0 else ()
                continue
            channel, here = _channel(kind, call), (call.step, call.number)
            found[rank] = tuple(
                member
                for member in sorted(status.place.members)
                if member in came and came[member].get(channel, _NOWHERE) < here
            )
        return found


Channel = tuple[str, tuple[int, ...], int]
"""A group, its members, a mode."""


def _channel(kind: Mapping[str, Any], call: EnteredCall) -> Channel:
    members = tuple(sorted(map(int, kind.get("members", ()))))
    return str(kind.get("group", "")), members, call.mode


def _came_to(tail: StreamTail) -> dict[Channel, tuple[int, int]]:
    """Return of each channel the step of its furthest collective, and which it was in the step."""
    found: dict[Channel, tuple[int, int]] = {}
    for number, call in tail.issued.items():
        kind = tail.definitions.get(number, {})
        if kind and kind.get("op") not in MESSAGES:
            channel = _channel(kind, call)
            found[channel] = max(found.get(channel, _NOWHERE), (call.step, call.number))
    return found


def _standing(tail: StreamTail, age_s: float) -> EnteredCall | None:
    """Return the collective in which a rank stands whose last record is so old."""
    issued = [call for call in tail.open.values() if call.collective]
    waited = [call for call in issued if tail.is_synchronous(call)]
    return next(iter(waited or (issued if age_s >= _QUIET_S else [])), None)


def _age_s(tail: StreamTail) -> float | None:
    """Return how old the last record is, by the wall clocks of its host and of this one."""
    identity = tail.identity
    if not (tail.written_ns and identity.get("wall_ns")):
        return None
    offset = int(identity["wall_ns"]) - int(identity.get("monotonic_ns", 0))
    return max(0.0, (time.time_ns() - tail.written_ns - offset) / 1e9)


def _whole_number(settings: object, name: str) -> int | None:
    text = settings.get(name) if isinstance(settings, dict) else None
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 20 else None


# ---- ranks beside each other -----------------------------------------------------------------


def _medians(statuses: Any) -> dict[int, float]:
    """Return {step: median over ranks of what it took them outside collectives}, of steps that two
    ranks or more have ended."""
    taken: dict[int, list[float]] = {}
    for status in statuses:
        for each in status.ended:
            taken.setdefault(each.step, []).append(each.own_s)
    return {step: median(each) for step, each in taken.items() if len(each) > 1}


def _compared(status: RankStatus, medians: Mapping[int, float]) -> RankStatus:
    both = [(each.own_s, medians[each.step]) for each in status.ended if each.step in medians]
    if not both:
        return status
    last = status.ended[-1]
    return replace(
        status,
        beside_all=last.own_s / max(medians[last.step], 1e-9) if last.step in medians else None,
        slow_steps=sum(own > _SLOW * middle for own, middle in both),
        compared_steps=len(both),
    )
