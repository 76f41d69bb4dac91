"""`rankscope capture`: have the next steps of a running job traced. An order is placed in the job's
folder, and followed until what it asks for has arrived there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import ExitCode, TraceArgument
from rankscope.cli.terminal import echo, remark
from rankscope.errors import FolderBusyError, FolderError, SettingError, TraceError
from rankscope.record.call import Mode
from rankscope.record.ranks import EndReason, ranks_named
from rankscope.run.agreements import Order, TakenOrder, order_in, put_order, sightings, taken_orders
from rankscope.run.filenames import REPLICA_FOLDER, TRACE_NAME
from rankscope.run.files import own_subfolder
from rankscope.run.folders import SHARED, find_runs, streams
from rankscope.run.jobstatus import OLD_S, RankStatus
from rankscope.run.prepare import command_text
from rankscope.settings import settings_from
from rankscope.tree.reader import trace_folder
from rankscope.tree.unfinished import is_at_work, received_bytes, spool_bases, status_in

_LOOK_S = 0.2
_TOLD_S = 3.0
"""After so long a host whose relay has not seen the order is named."""


def command(
    trace: TraceArgument = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Trace the next N steps.")] = 1,
    paths: Annotated[
        str,
        typer.Option(metavar="GLOBS", help="Modules to trace besides those of the job's setting."),
    ] = "",
    tensors: Annotated[
        str,
        typer.Option(
            metavar="GLOBS", help="Full tensors to keep, as path:slot, besides those of the job."
        ),
    ] = "",
    waits: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the steps have arrived.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait; then exit code 1.")
    ] = 600.0,
) -> None:
    """Have all ranks of a running job trace the next steps; of a black box, those it holds.

    Exit code 0: the steps are there, or --no-wait; 1: not all of them, the order may still stand;
    2: nothing was ordered.
    """
    globs = settings_from({"paths": paths}, {}).paths if paths else ()
    kept = (settings_from({"tensors": tensors}, {}).tensors or ()) if tensors else ()
    ordering = _Ordering(trace_folder(trace))
    try:
        ordering.place(steps=steps, paths=globs, tensors=kept)
        besides = f", with the modules {','.join(globs)}" if globs else ""
        besides += f", full tensors of {','.join(kept)}" if kept else ""
        count = "step" if steps == 1 else f"{steps} steps"
        echo(f"ordered: the next {count} of all traced ranks{besides}")
        if waits:
            _follow(ordering, seconds, has_wishes=steps > 1 or bool(globs or kept))
        else:
            echo(_reading(ordering))
    except KeyboardInterrupt:
        remark("the order stands")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _follow(ordering: _Ordering, seconds: float, *, has_wishes: bool) -> None:
    began = time.monotonic()
    is_first_said = are_untold_said = False
    while True:
        found = ordering.look()
        now = time.monotonic()
        if found.first >= 0 and not is_first_said:
            is_first_said = True
            echo(f"{_steps(found)}{' are held and sent' if found.is_held else ': it is'}")
            if found.is_held and has_wishes:
                echo("of a job that holds its last steps back these are all one can have")
        if found.untold and not are_untold_said and now - began > _TOLD_S:
            are_untold_said = True
            for host, ranks in found.untold:
                remark(
                    f"{ranks_named(ranks)} on {host or 'an unknown host'}: no relay there has seen "
                    "the order in this folder"
                )
        is_unread = found.first >= 0 and found.unread_s > OLD_S and now - began > OLD_S
        if found.is_complete or found.is_job_over or is_unread or not now - began <= seconds:  # nan
            break
        time.sleep(_LOOK_S)
    if not found.is_job_over and found.first >= 0:
        for line in _came(found):
            echo(line)
    if found.is_complete:
        echo(_reading(ordering, found))
        return
    if found.is_job_over and found.first >= 0:
        echo(f"the job ended meanwhile: what came of {_steps(found)} is in the trace")
        echo(_reading(ordering, found))
    elif found.is_job_over:
        echo("the job ended before any rank took the order")
    elif is_unread:
        echo(
            f"the records were read {found.unread_s:.0f} s ago for the last time: whether "
            f"{_steps(found)} of {ranks_named(found.waited_for)} came is not known"
        )
        echo(_reading(ordering, found))
    elif found.first < 0:
        echo(f"no rank has taken the order in {seconds:g} s; it stands until the job ends")
    else:
        echo(f"{ranks_named(found.waited_for)} not there after {seconds:g} s; the order stands")
    raise typer.Exit(ExitCode.FINDING)


def _came(found: _Progress) -> Iterator[str]:
    if found.arrived:
        yield f"there: {_steps(found)} of {ranks_named(found.arrived)}"
    missed: dict[int, list[int]] = {}
    for rank, step in found.missed:
        missed.setdefault(step, []).append(rank)
    for step, ranks in sorted(missed.items()):
        who = f"{ranks_named(sorted(ranks))}, which saw the order too late"
        yield f"missed: {found.mode.word} step {step} by {who}"


def _steps(found: _Progress) -> str:
    if found.first == found.last:
        return f"{found.mode.word} step {found.first}"
    return f"{found.mode.word} steps {found.first}-{found.last}"


def _reading(ordering: _Ordering, found: _Progress | None = None) -> str:
    """Return the command that reads what came."""
    line = f"read it: {command_text('show', ordering.folder)}"
    if found is None:
        return line
    chosen = f"{found.first}" if found.first == found.last else f"{found.first}-{found.last}"
    return f"{line} --step {chosen}{'' if found.mode.word == 'train' else ' --mode eval'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
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
        return self.first >= 0 and bool(self.arrived) and not self.waited_for


class _Ordering:
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

    def place(self, *, steps: int, paths: tuple[str, ...], tensors: tuple[str, ...]) -> None:
        """Write an order; ranks and relays look for it by themselves.

        Raises:
            SettingError: the order is none that ranks could take, or hosts could not agree on it.
            FolderBusyError: an order stands already.
            SpoolError: it cannot be written.
        """
        order = Order(number=time.time_ns(), steps=steps, paths=paths, tensors=tensors)
        hosts = {each.host for each in self._status.ranks if each.host}
        if self._is_elsewhere() and (len(hosts) > 1 or not self._elsewhere):
            where = "on several hosts" if len(hosts) > 1 else "on another host"
            raise SettingError(
                f"{self.folder}: the ranks are {where} and do not see this folder, because their "
                "records go through --rs-collector: no order can reach them"
            )
        self._refuse_second()
        if not self._elsewhere:
            put_order(own_subfolder(self.folder / REPLICA_FOLDER), order)
        for run_folder in self._elsewhere:
            put_order(run_folder, order)
        self._order = order

    def look(self) -> _Progress:
        order = self._order
        assert order is not None  # placed before
        is_over = not is_at_work(self.folder, self._status.run)
        self._status = status_in(self.folder)
        statuses = self._status.ranks
        if (held := self._held(order)) is not None:
            mode, first, last = held
            of_life, is_held = statuses, True
        else:
            taken = next((t for t in self._taken() if t.order.number == order.number), None)
            if taken is None or not taken.stands:
                return _Progress(untold=self._untold(order, statuses), is_job_over=is_over)
            mode, first, last, is_held = taken.mode, taken.first, taken.last, False
            of_life = tuple(each for each in statuses if each.incarnation == taken.life)
        needed = last - 1 if is_held else last  # a step that is held may still run
        arrived = [s.rank for s in of_life if _has(s, mode, needed)]
        # of one that has ended this host may know before its last records have come
        coming = [
            s.rank for s in of_life if s.place.end == EndReason.RUNNING.value or s.unsent_bytes
        ]
        return _Progress(
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
        return str(self._status.run["settings"].get("collector", "")) not in ("", SHARED)

    def _places(self) -> list[Path]:
        return self._elsewhere or [self.folder / REPLICA_FOLDER]

    def _taken(self) -> list[TakenOrder]:
        return [taken for place in self._places() for taken in taken_orders(place)]

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
        for seen in sightings(self.folder, order.number):
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
            told = {rank for seen in sightings(self.folder, order.number) for rank in seen.ranks}
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
