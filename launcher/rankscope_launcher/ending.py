"""What the launcher says last: where the trace is, or the command that makes one of the records."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rankscope.errors import RankscopeError
from rankscope.record.notes import NoteKind
from rankscope.record.stepselection import StepSelection, Trigger
from rankscope.run.agreements import held_anything
from rankscope.run.folders import (
    CELLS_SUFFIX,
    COLLECTOR_LOG_NAME,
    REPLICA_FOLDER,
    TRACE_NAME,
    streams,
)
from rankscope.run.jobstatus import first_failures, has_failed, signal_of
from rankscope.run.prepare import QUIET, Collection, announcement, command_text, recover_command
from rankscope.run.processes import ExitOutcome
from rankscope.tree.crashes import Crash, crashes
from rankscope.tree.reader import open_trace
from rankscope_launcher.companions import Companion
from rankscope_launcher.untraced import Reached

__all__ = ["HostPart", "failure_line", "shown"]

_NO_STEP = (NoteKind.NO_STEP_REACHED, NoteKind.NO_STEP_BEGUN)
_LONGEST_ERROR = 300
"""Characters of an exception's text that the line repeats."""
_NO_ROOM = "its disk is full, or cannot be written; make room first"


@dataclass(slots=True, kw_only=True)
class HostPart:
    """One host's part in a trace, and how far it has come."""

    out: Path
    run_folder: Path
    collection: Collection
    steps: StepSelection
    """The setting."""
    companion: Companion
    gathers: bool
    """It gathers the run; False where another host of it does, or a collector."""
    was_held: bool = False
    """Ranks of this host held steps back."""

    def has_tree(self) -> bool:
        """True once the tree is in this host's trace folder."""
        return not self.collection.is_elsewhere and (self.out / TRACE_NAME).exists()

    def has_no_room(self) -> bool:
        """True where the companion gave up because the trace folder takes nothing."""
        return self.companion.outcome() == ExitOutcome.NO_ROOM

    def has_records(self) -> bool:
        """True where any rank opened a spool, as far as this host sees."""
        folders = [f for f in (self.run_folder, self.out / REPLICA_FOLDER) if f.is_dir()]
        if any(streams(f) or any(f.glob(f"rank*{CELLS_SUFFIX}")) for f in folders):
            return True
        return held_anything(self.run_folder)

    def last_line(self, untraced: str) -> str:
        """Return the last line; `untraced` where no rank opened a spool."""
        if self.collection.is_elsewhere:
            return self._of_records_sent()
        folder = shown(self.out)
        if self.has_tree():
            return self._of_tree(folder)
        if self.has_no_room():
            return (
                f"no tree in {self.out}: {_NO_ROOM}; build it from the records: {self._recover()}"
            )
        if not self.gathers and self.was_held:
            return f"where anything happened, the collector builds a trace in {self.out}"
        if not self.gathers:
            return f"the records of this host are in {self.out}; its collector builds the tree"
        code = self.companion.outcome()
        if code is None:
            return (
                f"the trace follows in {self.out}; read it then: {command_text('show', folder)} "
                f"(not waited for any longer; should it not come: {self._recover()})"
            )
        if code == ExitOutcome.DONE and not self.has_records():
            return self._of_nothing() if self.was_held else untraced
        why = f"the collector ended with code {code}, see {self.out / COLLECTOR_LOG_NAME}"
        return f"no tree in {self.out}: {why}; build it from the records: {self._recover()}"

    def _of_nothing(self) -> str:
        facts = [trigger.value for trigger in Trigger if self.steps.waits_for(trigger)]
        looked = ", ".join(each.otherwise for each in facts if each.otherwise)
        looked = looked.format(file=self.steps.file)
        return f"{QUIET}: {looked}"

    def _of_tree(self, folder: str) -> str:
        try:
            found = open_trace(self.out)
        except RankscopeError:
            return announcement(self.out, folder, is_complete=False)
        notes = () if found.steps else chain.from_iterable(found.error_notes)
        remark = next((str(note) for note in notes if note.kind in _NO_STEP), "")
        return announcement(self.out, folder, is_complete=found.is_complete, remark=remark)

    def _of_records_sent(self) -> str:
        address = self.collection.address
        code = self.companion.outcome()
        if code == ExitOutcome.DONE:
            where = ", where anything happened" if self.was_held else ""
            return f"records went to the collector at {address}, which writes the tree{where}"
        if code == ExitOutcome.REJECTED:
            return (
                f"the collector at {address} gathers another run and took nothing of this "
                f"one; build its tree from the records here: {self._recover()}"
            )
        if code == ExitOutcome.STRANGE:
            return (
                f"the collector at {address} and this host have keys that do not fit, so nothing "
                f"was sent (see --rs-keys); build the tree from the records here: {self._recover()}"
            )
        return (
            f"the collector at {address} has not finished the trace; what it will not have "
            f"taken stays here: {self._recover()}"
        )

    def _recover(self) -> str:
        """Return the command that makes a tree of what this host holds."""
        places = [shown(self.run_folder)] if self.run_folder.is_dir() else []
        if (self.out / REPLICA_FOLDER).is_dir():
            places.append(shown(self.out))
        return recover_command(*places, out=shown(self.out))


def failure_line(error: BaseException | None, out: Path, noted: Sequence[Reached] = ()) -> str:
    """Return what the launcher says of a job that failed, "" where none did.

    torchrun notes when a rank failed in whole seconds, and peers fail within the same one. Of
    those, a rank that a signal killed comes first, then the one whose exception is the first in the
    trace; last a rank that got SIGTERM, which torchrun sends to the peers of one that failed, once
    it has noted that one.

    Args:
        error: what left torchrun.
        out: the trace folder.
        noted: how far processes of ranks came.
    """
    if error is None or not has_failed(error):
        return ""
    failures: dict[int, Any] = getattr(error, "failures", {})  # of torch's ChildFailedError
    if not failures and (name := signal_of(error)):
        return f"the job was interrupted by {name}"
    if not failures:
        return f"the job failed: {_one_line(f'{type(error).__name__}: {error}')}"
    pids = {one.pid for one in noted}
    shells = {rank for rank, failure in failures.items() if failure.pid not in pids}
    raised = [
        crash
        for crash in _crashes(out)
        if crash.rank in failures
        and (crash.rank in shells or crash.pid == failures[crash.rank].pid)  # of this life
    ]
    order = [crash.rank for crash in raised]
    first = first_failures(error)
    seen = list(failures)

    def place(rank: int) -> tuple[int, int, int]:
        code = failures[rank].exitcode
        how = 2 if code == -signal.SIGTERM else 0 if code < 0 else 1
        return how, order.index(rank) if rank in order else len(order), seen.index(rank)

    rank = min(first, key=place)
    failure = failures[rank]
    if failure.exitcode < 0:
        return f"the job failed: rank {rank} first, killed by {failure.signal_name()}"
    text = next((str(c) for c in raised if c.rank == rank), "") or _crash_text(failure.message)
    text = text or next((one.text for one in noted if one.pid == failure.pid and one.text), "")
    return f"the job failed: rank {rank} first, with exit code {failure.exitcode}" + (
        f": {_one_line(text)}" if text else "; what it said stands above, or in its log"
    )


def _crashes(out: Path) -> list[Crash]:
    """Return the exceptions in a trace, the first in time first; none where there is no tree."""
    try:
        return crashes(open_trace(out, wait_s=0)) if (out / TRACE_NAME).exists() else []
    except RankscopeError:
        return []


def _crash_text(message: object) -> str:
    """Return what a rank wrote into its error file; without one, torch says how to get one."""
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def _one_line(text: str) -> str:
    line = " ".join(text.split("\n"))
    return line if len(line) <= _LONGEST_ERROR else f"{line[:_LONGEST_ERROR]}..."


def shown(path: Path) -> str:
    """Return a path as it may be typed here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
