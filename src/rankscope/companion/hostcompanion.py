"""The companion of one host.

It sends on what the ranks of its host record. On the head host it gathers the run too, and has the
tree built. A collector that was started by hand has the trace folder for its run folder, and no
ranks of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rankscope.companion.gathering import (
    FIRST_RELAY_S,
    CollectorOptions,
    Observer,
    Turns,
    gathering,
)
from rankscope.companion.relay import Relay
from rankscope.companion.waitingrule import HostState
from rankscope.errors import FolderBusyError, SpoolError
from rankscope.run.filenames import COMPANION_LOCK_NAME, RUN_NAME
from rankscope.run.folders import FolderLock, RunHeader, read_run_header
from rankscope.run.messages import log
from rankscope.run.prepare import Collection
from rankscope.run.processes import ExitOutcome, settings_of_gathering

_IDLE_S = 0.02
_LOOK_S = 0.05
"""How often a run is looked at that is gathered here."""


class HostCompanion:
    """What a host does for its own ranks, and where it is the head for the run, by turns."""

    def __init__(
        self, run_folder: Path, is_stopped: Callable[[], bool], observer: Observer | None = None
    ) -> None:
        """Take the run folder.

        Args:
            run_folder: of the host; of a collector by hand its trace folder.
            is_stopped: true once somebody asked for an end (SIGTERM).
            observer: told how far the gathering is.

        Raises:
            FolderBusyError: another one is at work there.
            SpoolError: it cannot be used.
        """
        if not run_folder.is_dir():
            raise SpoolError(f"{run_folder}: is not a folder; give the run folder of a host")
        self._folder, self._is_stopped, self._observer = run_folder, is_stopped, observer
        self._header = read_run_header(run_folder)
        self._is_by_hand = run_folder == self._header.out
        self._lock: FolderLock | None = None  # a collector has its own
        if not self._is_by_hand:
            self._lock = FolderLock(run_folder / COMPANION_LOCK_NAME, "companion")
        self._is_busy = False
        """Another process gathers the run."""
        self._relay: Relay | None = None
        self._turns: Turns[ExitOutcome] | None = None
        """Of a run that is gathered here."""
        self._gathered: ExitOutcome | None = None
        self._looked_at = float("-inf")

    def run(self) -> ExitOutcome:
        """Work until the run is finished, or this host can do no more for it. RankscopeError: it
        cannot begin."""
        try:
            header = self._header
            collection = Collection.of_run(header)
            # gathering first: whether the relay is alone is known only then
            if header.collects and not self._begin_gathering(header, collection):
                log(f"{header.out} is gathered by another process")
            if not self._is_by_hand:
                is_alone = self._turns is None
                self._relay = Relay(self._folder, header, self._is_stopped, is_alone=is_alone)
            return self._work()
        finally:
            if self._turns is not None:
                self._turns.close()
            if self._lock is not None:
                self._lock.release()
            if self._gathered is not None or (self._is_by_hand and not self._is_busy):
                (self._header.out / RUN_NAME).unlink(missing_ok=True)  # of a collector by hand

    def _begin_gathering(self, header: RunHeader, collection: Collection) -> bool:
        """Begin to gather; False where another host of a shared folder does."""
        listens = collection.is_elsewhere
        turns = gathering(
            CollectorOptions(
                run_folder=self._folder,
                out=header.out,
                bind=(header.collector,) if listens else (),
                world_size=header.world_size,
                traced_ranks=header.collects,
                settings=settings_of_gathering(header),
                first_relay_s=float("inf") if self._is_by_hand else FIRST_RELAY_S,
            ),
            self._is_stopped,
            self._observer,
            wait_s=_LOOK_S if listens else 0.0,
            own_host=None if collection.is_shared or self._is_by_hand else self._own_host,
        )
        try:
            next(turns)
        except FolderBusyError:
            self._is_busy = True
            if self._is_by_hand or not collection.is_shared:
                raise
            return False
        except StopIteration as end:
            self._gathered = end.value
            return True
        self._turns = turns
        return True

    def _own_host(self) -> HostState | None:
        return None if self._relay is None else self._relay.state

    def _work(self) -> ExitOutcome:
        while True:
            self._gather()
            relay = self._relay
            if relay is None:  # the turns of a collector wait by themselves
                if self._gathered is not None:
                    return self._gathered
                continue
            was_busy = relay.outcome is None and relay.turn()
            outcome = relay.outcome
            # the relay stays until the tree is built: it is asked for the state of this host
            if outcome is None and self._turns is None and not relay.is_alone:
                outcome = self._gathered
            if outcome is not None:
                relay.close(outcome)
                return outcome
            if not was_busy:
                relay.wait(_IDLE_S)

    def _gather(self) -> None:
        """Let the gathering have its turn."""
        now = time.monotonic()
        if self._turns is None or (self._relay is not None and now - self._looked_at < _LOOK_S):
            return
        self._looked_at = now
        try:
            next(self._turns)
        except StopIteration as end:
            self._turns, self._gathered = None, end.value
