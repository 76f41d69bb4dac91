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
from rankscope.run.files import own_subfolder
from rankscope.run.folders import REPLICA_FOLDER, SHARED, TRACE_NAME, find_runs, streams
from rankscope.run.jobstatus import OLD_S, RankStatus
from rankscope.run.prepare import command_text
from rankscope.settings import settings_from
from rankscope.tree.reader import is_at_work, received_bytes, spool_bases, status_in, trace_folder

_LOOK_S = 0.2
_TOLD_S = 3.0
"""After so long a host whose relay has not seen the order is named."""


def command(
    trace: TraceArgument = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Trace the next N steps.")] = 1,
    paths: Annotated[
        str, typer.Option(metavar="GLOBS", help="More modules to trace than the job's setting has.")
    ] = "",
    tensors: Annotated[
        str,
        typer.Option(
            metavar="GLOBS", help="More full tensors to keep, as path:slot, than the job does."
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
    kinds = (settings_from({"tensors": tensors}, {}).tensors or ()) if tensors else ()
    ordering = _Ordering(trace_folder(trace))
    try:
        ordering.place(steps=steps, paths=globs, tensors=kinds)
        besides = f", with the modules {','.join(globs)}" if globs else ""
        besides += f", full tensors of {','.join(kinds)}" if kinds else ""
        count = "step" if steps == 1 else f"{steps} steps"
        echo(f"ordered: the next {count} of all traced ranks{besides}")
        if waits:
            _follow(ordering, seconds, has_wishes=steps > 1 or bool(globs or kinds))
        else:
            echo(_reading(ordering))
    except KeyboardInterrupt:
        remark("the order stands")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _follow(ordering: _Ordering, seconds: float, *, has_wishes: bool) -> None:
    began = time.monotonic()
    is_first_said = are_untold_said = False
    while True:
        state = ordering.look()
        now = time.monotonic()
        if state.first >= 0 and not is_first_said:
            is_first_said = True
            echo(f"{_steps(state)}{' are held and sent' if state.is_held else ': it is'}")
            if state.is_held and has_wishes:
                echo("of a job that holds its last steps back these are all one can have")
        if state.untold and not are_untold_said and now - began > _TOLD_S:
            are_untold_said = True
            for host, ranks in state.untold:
                remark(
                    f"{ranks_named(ranks)} on {host or 'an unknown host'}: no relay there has seen "
                    "the order in this folder"
                )
        is_unread = state.first >= 0 and state.unread_s > OLD_S and now - began > OLD_S
        if state.is_complete or state.is_job_over or is_unread or not now - began <= seconds:  # nan
            break
        time.sleep(_LOOK_S)
    if not state.is_job_over and state.first >= 0:
        for line in _came(state):
            echo(line)
    if state.is_complete:
        echo(_reading(ordering, state))
        return
    if state.is_job_over and state.first >= 0:
        echo(f"the job ended meanwhile: what came of {_steps(state)} is in the trace")
        echo(_reading(ordering, state))
    elif state.is_job_over:
        echo("the job ended before any rank took the order")
    elif is_unread:
        echo(
            f"the records were read {state.unread_s:.0f} s ago for the last time: whether "
            f"{_steps(state)} of {ranks_named(state.waited_for)} came is not known"
        )
        echo(_reading(ordering, state))
    elif state.first < 0:
        echo(f"no rank has taken the order in {seconds:g} s; it stands until the job ends")
    else:
        echo(f"{ranks_named(state.waited_for)} not there after {seconds:g} s; the order stands")
    raise typer.Exit(ExitCode.FINDING)


def _came(state: _Progress) -> Iterator[str]:
    if state.arrived:
        yield f"there: {_steps(state)} of {ranks_named(state.arrived)}"
    missed: dict[int, list[int]] = {}
    for rank, step in state.missed:
        missed.setdefault(step, []).append(rank)
    for step, ranks in sorted(missed.items()):
        late_ranks = f"{ranks_named(sorted(ranks))}, which saw the order too late"
        yield f"missed: {state.mode.word} step {step} by {late_ranks}"


def _steps(state: _Progress) -> str:
    if state.first == state.last:
        return f"{state.mode.word} step {state.first}"
    return f"{state.mode.word} steps {state.first}-{state.last}"


def _reading(ordering: _Ordering, state: _Progress | None = None) -> str:
    """Return the command that reads what came."""
    line = f"read it: {command_text('show', ordering.folder)}"
    if state is None:
        return line
    chosen = f"{state.first}" if state.first == state.last else f"{state.first}-{state.last}"
    return f"{line} --step {chosen}{'' if state.mode.word == 'train' else ' --mode eval'}"


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
            SettingError: no rank could take this order, or hosts could not agree on it.
            FolderBusyError: an order stands already.
            SpoolError: it cannot be written.
        """
        order = Order(number=time.time_ns(), steps=steps, paths=paths, tensors=tensors)
        hosts = {status.host for status in self._status.ranks if status.host}
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
        if (outcome := self._held(order)) is not None:
            mode, first, last = outcome
            of_life, is_held = statuses, True
        else:
            taken_order = next((t for t in self._taken() if t.order.number == order.number), None)
            if taken_order is None or not taken_order.stands:
                return _Progress(untold=self._untold(order, statuses), is_job_over=is_over)
            mode, first, last = taken_order.mode, taken_order.first, taken_order.last
            is_held = False
            of_life = tuple(status for status in statuses if status.incarnation == taken_order.life)
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
        return [order for place in self._places() for order in taken_orders(place)]

    def _refuse_second(self) -> None:
        """Let an order end before the next one; FolderBusyError: the last one has not ended."""
        last = next((o for o in map(order_in, self._places()) if o is not None), None)
        if last is None or self._held(last) is not None:
            return
        lives = [status.incarnation for status in self._status.ranks]
        age_s = (time.time_ns() - last.number) / 1e9
        steps = "step" if last.steps == 1 else f"{last.steps} steps"
        for order in self._taken():
            if order.order.number == last.number:
                if order.is_over or order.life < max(lives, default=0):
                    return
                raise FolderBusyError(
                    f"{self.folder}: an order stands already: {order.mode.word} {steps} from "
                    f"{order.first} on, ordered {age_s:.0f} s ago; it ends with step {order.last}"
                )
        raise FolderBusyError(
            f"{self.folder}: an order stands already: the next {steps}, ordered {age_s:.0f} s ago, "
            "and no rank has begun a step since"
        )

    def _held(self, order: Order) -> tuple[Mode, int, int] | None:
        """Return which steps of a black box become a trace; None where none do."""
        for sight in sightings(self.folder, order.number):
            words = sight.told.split()
            if len(words) == 4 and words[3] == str(order.number):
                return Mode[words[0].upper()], int(words[1]), int(words[2])
        return None

    # ---- how far it is ----------------------------------------------------------------------

    def _untold(
        self, order: Order, statuses: Sequence[RankStatus]
    ) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the hosts whose ranks run and have not been told, with these ranks."""
        if self._elsewhere:
            told_ranks = {stream.rank for folder in self._elsewhere for stream in streams(folder)}
        else:
            told_ranks = {
                rank for sight in sightings(self.folder, order.number) for rank in sight.ranks
            }
        untold: dict[str, list[int]] = {}
        for status in statuses:
            if status.rank not in told_ranks and status.place.end == EndReason.RUNNING.value:
                untold.setdefault(status.host, []).append(status.rank)
        return tuple((host, tuple(ranks)) for host, ranks in sorted(untold.items()))


def _has(status: RankStatus, mode: Mode, step: int) -> bool:
    """True where the records of a step have come, to its end, or were never to come."""
    if mode is Mode.TRAIN and any(step_end.step >= step for step_end in status.ended):
        return True
    if (mode, step) in status.missed:
        return True
    if status.mode is not mode or status.step is None:
        return False
    return status.step > step or (status.step == step and status.is_step_over)
