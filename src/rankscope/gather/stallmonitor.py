"""Whether any rank of a host still moves: what the relay alone can see, because it sees all spools.

A rank moves when its spool grows and when it ends. Where none has for the time that was set, and
one at least stands inside something that was to be recorded (`posture`), that is a standstill: it
is written down, and so is its end. Nothing is done to any process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from rankscope.errors import SpoolError
from rankscope.gather.log import log
from rankscope.gather.rankactivity import RankActivity, posture_of
from rankscope.gather.shipping import Shipment
from rankscope.record.ranklists import ranks_named
from rankscope.record.streams import StreamId
from rankscope.run.folders import RunHeader
from rankscope.run.locks import is_alive
from rankscope.run.stalls import Stall, keep_standstill, standstills_in
from rankscope.spool.streamreader import StreamReader

__all__ = ["StallMonitor"]

DEFAULT_LIMIT_S = 300.0
_LOOK_S = 1.0
_AWAY_S = 5.0
"""A relay that was itself away for longer than that has seen nothing meanwhile."""
_CLOSE_NS = 1_000_000_000
_MOST_PLACES = 4


class _Pulse:
    """One stream: how far it has grown, and when."""

    def __init__(self, shipment: Shipment, now: float) -> None:
        self._shipment = shipment
        self._reader = StreamReader(shipment.folder)
        self._end = 0
        self.is_alive = True
        self.grew_at = self.ended_at = now
        """`ended_at` of a rank that lives is when it was found."""
        self._postures: dict[int, RankActivity] = {}

    def look(self, now: float) -> None:
        """See whether it has grown or ended."""
        was_alive, self.is_alive = self.is_alive, self.is_alive and is_alive(self._shipment.folder)
        if was_alive and not self.is_alive:
            self.ended_at = now
        if not was_alive:
            return
        try:
            begin = max(self._end, self._shipment.sent, self._reader.lowest())
            end = self._reader.committed(begin)  # what was sent has been looked at before
        except SpoolError:
            self.grew_at = now  # not known: nobody is said to stand
            return
        finally:
            self._reader.close()
        if end > self._end:
            self._end, self.grew_at = end, now

    @property
    def has_all_sent(self) -> bool:
        """True where every record is over there. One that has not may have a full spool, and write
        nothing for that reason."""
        return self._shipment.acked == self._end

    def posture(self, *, counts_steps: bool) -> RankActivity:
        """Return where it stands, read once for each end of its records."""
        if self._end not in self._postures:
            try:
                self._postures = {self._end: posture_of(self._reader, counts_steps=counts_steps)}
            except SpoolError:
                return RankActivity(written_ns=0, inside="")
            finally:
                self._reader.close()
        return self._postures[self._end]


class StallMonitor:
    """Watches the streams of one host."""

    def __init__(self, run_folder: Path, header: RunHeader, relay: str) -> None:
        """Watch nothing yet; take up the standstill that an earlier relay of this host noticed.

        Args:
            run_folder: keeps what was noticed for the launcher, and for the next relay.
            header: the run's, for the setting `hang-seconds`.
            relay: name of the relay.
        """
        self._run_folder = run_folder
        self._relay = relay
        self._limit_s = _limit_s(header)
        self._counts_steps = _counts_steps(header)
        self._pulses: dict[StreamId, _Pulse] = {}
        self._looked_at = float("-inf")
        self._noticed_at = time.monotonic()
        self.latest: Stall | None = next(iter(standstills_in(run_folder)[-1:]), None)
        """The last one noticed; its `over_ns` is 0 while it lasts."""
        self._is_taken_up = self._stands

    @property
    def _stands(self) -> bool:
        return self.latest is not None and not self.latest.over_ns

    def look(self, shipments: Mapping[StreamId, Shipment], now: float) -> None:
        """See who moves; cheap, and does nothing most of the time."""
        if not self._limit_s:
            return
        is_due = now - self._looked_at >= min(_LOOK_S, self._limit_s / 4)
        if not is_due and not self._is_about_to_end(shipments):
            return
        away_s, self._looked_at = now - self._looked_at, now
        for stream, shipment in shipments.items():
            if stream not in self._pulses:
                self._pulses[stream] = _Pulse(shipment, now)
        if not self._pulses:
            return
        if _AWAY_S < away_s < float("inf"):
            for pulse in self._pulses.values():
                pulse.grew_at += away_s
        for pulse in self._pulses.values():
            pulse.look(now)
        if self._stands:
            self._look_for_its_end()
        else:
            self._look_for_one(now)

    def _is_about_to_end(self, shipments: Mapping[StreamId, Shipment]) -> bool:
        """True where the last rank has just gone: soon nobody asks this relay any more."""
        return self._stands and not any(shipment.is_alive for shipment in shipments.values())

    def _look_for_one(self, now: float) -> None:
        moved_at = max(max(p.grew_at, p.ended_at) for p in self._pulses.values())
        if now - moved_at < self._limit_s:
            return
        places: dict[str, list[int]] = {}
        for stream, pulse in self._pulses.items():
            if pulse.is_alive and pulse.has_all_sent:
                inside = pulse.posture(counts_steps=self._counts_steps).inside
                if inside:
                    places.setdefault(inside, []).append(stream.rank)
        if not places:
            return
        listed = [f"{ranks_named(ranks)} in {inside}" for inside, ranks in places.items()]
        self._noticed_at = now
        self._is_taken_up = False
        self._note(
            Stall(
                host=socket.gethostname(),
                since_ns=self._wall_ns(self._last_ns()),
                noticed_ns=time.time_ns(),
                where=", ".join(
                    [*listed[:_MOST_PLACES], *(["..."] * (len(listed) > _MOST_PLACES))]
                ),
            )
        )

    def _look_for_its_end(self) -> None:
        assert self.latest is not None  # it stands
        has_grown = any(pulse.grew_at > self._noticed_at for pulse in self._pulses.values())
        has_ended = any(
            p.ended_at > self._noticed_at for p in self._pulses.values() if not p.is_alive
        )
        if self._is_taken_up:  # it may have gone on while no relay was there
            is_later = self._wall_ns(self._last_ns()) > self.latest.since_ns + _CLOSE_NS
            has_ended = not any(pulse.is_alive for pulse in self._pulses.values())
            has_grown, self._is_taken_up = is_later, False
            self._noticed_at = time.monotonic()
        if has_grown or has_ended:
            self._note(
                dataclasses.replace(self.latest, over_ns=time.time_ns(), is_by_end=not has_grown)
            )

    def _last_ns(self) -> int:
        """Return the monotonic time of the last move of any rank."""
        written = [
            pulse.posture(counts_steps=self._counts_steps).written_ns
            if pulse.is_alive
            else int(pulse.ended_at * 1e9)
            for pulse in self._pulses.values()
        ]
        return max(written)

    @staticmethod
    def _wall_ns(monotonic_ns: int) -> int:
        return max(0, time.time_ns() - (time.monotonic_ns() - monotonic_ns))

    def _note(self, standstill: Stall) -> None:
        self.latest = standstill
        log(standstill.told(time.time_ns()))
        with contextlib.suppress(SpoolError):  # a full disk: the log has it
            keep_standstill(self._run_folder, self._relay, standstill)


def _counts_steps(header: RunHeader) -> bool:
    """True where a train step before its optimizer is one to wait for. A program of one rank may
    well stop there, for its user to look at gradients; and without records of gradients or
    parameters none says that the optimizer has stepped."""
    phases = header.settings.get("phases", "all").split(",")
    return header.world_size > 1 and bool({"all", "grads", "params"} & set(phases))


def _limit_s(header: RunHeader) -> float:
    try:
        return float(header.settings.get("hang-seconds", DEFAULT_LIMIT_S))
    except ValueError:
        return DEFAULT_LIMIT_S
