"""An order of `rankscope capture`: placed in the folder of a running job, and followed until what
it asks for has arrived there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import FolderBusyError, FolderError, SettingError, TraceError
from rankscope.record.call import Mode
from rankscope.record.streams import EndReason
from rankscope.run.filenames import REPLICA_FOLDER, TRACE_NAME
from rankscope.run.folders import SHARED, find_runs, streams
from rankscope.run.jobstatus import RankStatus
from rankscope.run.orders import Order, TakenOrder, order_in, put_order, seen_by, taken_in
from rankscope.run.ownership import own_subfolder
from rankscope.tree.unfinished import is_at_work, received_bytes, spool_bases, status_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What has become of an order."""

    mode: Mode = Mode.TRAIN
    first: int = -1
    """First step that is asked for; -1 while no rank has taken the order."""
    last: int = -1
    is_held: bool = False
    """The job holds its last steps back: these are the steps."""
    arrived: tuple[int, ...] = ()
    """Ranks whose records of these steps are there, to the last."""
    waited_for: tuple[int, ...] = ()
    """Ranks that run, or ended just now, and whose records are not all there."""
    missed: tuple[tuple[int, int], ...] = ()
    """(rank, step) of steps that a rank could not trace."""
    untold: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Hosts whose relays have not seen the order, with their ranks."""
    is_job_over: bool = False
    unread_s: float = 0.0
    """How long ago the records were read last: what has arrived since is not known."""

    @property
    def is_complete(self) -> bool:
        """True where there is nothing to wait for."""
        return self.first >= 0 and bool(self.arrived) and not self.waited_for


class Ordering:
    """Orders for one running job."""

    def __init__(self, folder: Path) -> None:
        """Look at the job; FolderError: no such folder, TraceError: no trace, or nobody at work on
        it."""
        if not folder.is_dir():
            raise FolderError(f"{folder}: no such folder")
        self.folder = folder
        self._status = status_in(folder)
        if not is_at_work(folder, self._status.run):
            if (folder / TRACE_NAME).exists():
                raise TraceError(f"{folder}: the job is over, its trace is finished")
            if received_bytes(folder):
                raise TraceError(
                    f"{folder}: the job is gone: neither a rank nor a process of rankscope is at "
                    "work on it"
                )
            raise TraceError(
                f"{folder}: holds no records in {REPLICA_FOLDER}/, and nobody is at work on it; "
                "give the trace folder of a running job"
            )
        self._order: Order | None = None
        self._elsewhere: list[Path] = []
        if self._is_elsewhere():
            run = self._status.run
            self._elsewhere = find_runs(spool_bases(run), run["id"])

    def place(self, *, steps: int, paths: Sequence[str], tensors: Sequence[str] = ()) -> Order:
        """Write an order; ranks and relays look for it by themselves.

        Raises:
            SettingError: the order is none that ranks could take, or hosts could not agree on it.
            FolderBusyError: an order stands already.
            SpoolError: it cannot be written.
        """
        order = Order(
            number=time.time_ns(), steps=steps, paths=tuple(paths), tensors=tuple(tensors)
        )
        hosts = {each.host for each in self._status.ranks if each.host}
        if self._is_elsewhere() and (len(hosts) > 1 or not self._elsewhere):
            where = "on several hosts" if len(hosts) > 1 else "on another host"
            raise SettingError(
                f"{self.folder}: the ranks are {where} and do not see this folder, because their "
                "records go through --rs-collector: no order can reach them"
            )
        self._refuse_second()
        if not self._elsewhere:
            replicas = own_subfolder(self.folder / REPLICA_FOLDER)
            put_order(replicas, order)
        for run_folder in self._elsewhere:
            put_order(run_folder, order)
        self._order = order
        return order

    def look(self) -> Progress:
        """Return what has become of the order by now."""
        order = self._order
        assert order is not None  # placed before
        is_over = not is_at_work(self.folder, self._status.run)
        self._status = status_in(self.folder)
        statuses = self._status.ranks
        held = self._held(order)
        if held is not None:
            mode, first, last = held
            of_life, is_held = statuses, True
        else:
            taken = next((t for t in self._taken() if t.order.number == order.number), None)
            if taken is None or not taken.stands:
                return Progress(untold=self._untold(order, statuses), is_job_over=is_over)
            mode, first, last, is_held = taken.mode, taken.first, taken.last, False
            of_life = tuple(each for each in statuses if each.incarnation == taken.life)
        needed = last - 1 if is_held else last  # a step that is held may still run
        arrived = [s.rank for s in of_life if _has(s, mode, needed)]
        # of one that has ended this host may know before its last records have come
        coming = [
            s.rank for s in of_life if s.place.end == EndReason.RUNNING.value or s.unsent_bytes
        ]
        return Progress(
            mode=mode,
            first=first,
            last=last,
            is_held=is_held,
            arrived=tuple(arrived),
            waited_for=tuple(rank for rank in coming if rank not in arrived),
            missed=tuple(
                (s.rank, step) for s in of_life for m, step in s.missed
                if m is mode and first <= step <= last
            ),
            untold=self._untold(order, statuses),
            is_job_over=is_over,
            unread_s=self._status.age_s or 0.0,
        )  # fmt: skip

    # ---- the order --------------------------------------------------------------------------

    def _is_elsewhere(self) -> bool:
        collector = str(self._status.run["settings"].get("collector", ""))
        return collector not in ("", SHARED)

    def _places(self) -> list[Path]:
        return self._elsewhere or [self.folder / REPLICA_FOLDER]

    def _taken(self) -> list[TakenOrder]:
        return [taken for place in self._places() for taken in taken_in(place)]

    def _refuse_second(self) -> None:
        """Let an order end before the next one; FolderBusyError: the last one has not ended."""
        last = next((o for o in map(order_in, self._places()) if o is not None), None)
        if last is None or self._held(last) is not None:
            return
        lives = [each.incarnation for each in self._status.ranks]
        age_s = (time.time_ns() - last.number) / 1e9
        steps = "step" if last.steps == 1 else f"{last.steps} steps"
        for taken in self._taken():
            if taken.order.number == last.number:
                if taken.is_over or taken.life < max(lives, default=0):
                    return
                raise FolderBusyError(
                    f"{self.folder}: an order stands already: {taken.mode.word} {steps} from "
                    f"{taken.first} on, ordered {age_s:.0f} s ago; it ends with step {taken.last}"
                )
        raise FolderBusyError(
            f"{self.folder}: an order stands already: the next {steps}, ordered {age_s:.0f} s ago, "
            "and no rank has begun a step since"
        )

    def _held(self, order: Order) -> tuple[Mode, int, int] | None:
        """Return which steps of a black box become a trace; None where none do."""
        for seen in seen_by(self.folder, order.number):
            words = seen.told.split()
            if len(words) == 4 and words[3] == str(order.number):
                return Mode[words[0].upper()], int(words[1]), int(words[2])
        return None

    # ---- how far it is ----------------------------------------------------------------------

    def _untold(
        self, order: Order, statuses: Sequence[RankStatus]
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the hosts whose ranks run and have not been told, with these ranks."""
        if self._elsewhere:
            told = {stream.rank for folder in self._elsewhere for stream in streams(folder)}
        else:
            told = {rank for seen in seen_by(self.folder, order.number) for rank in seen.ranks}
        untold: dict[str, list[int]] = {}
        for each in statuses:
            if each.rank not in told and each.place.end == EndReason.RUNNING.value:
                untold.setdefault(each.host, []).append(each.rank)
        return tuple((host, tuple(ranks)) for host, ranks in sorted(untold.items()))


def _has(status: RankStatus, mode: Mode, step: int) -> bool:
    """True where the records of a step have come, to its end, or were never to come."""
    if mode is Mode.TRAIN and any(each.step >= step for each in status.ended):
        return True
    if (mode, step) in status.missed:
        return True
    if status.mode is not mode or status.step is None:
        return False
    return status.step > step or (status.step == step and status.is_step_over)
