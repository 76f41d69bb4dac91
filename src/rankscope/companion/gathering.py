"""From the first stream to the finished tree: how a run is gathered.

Beside a running job goes a process that reads it step by step (`ReaderProcess`). It comes once
records have been there for some seconds, so that a job that is over quickly has none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from rankscope.companion.collector import Intake
from rankscope.companion.replica import SharedWatch
from rankscope.companion.waitingrule import Decision, HostState, JobState, StreamSource, decide
from rankscope.errors import FolderError, os_errors_as
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.connection import read_keys
from rankscope.run.files import check_folder_found
from rankscope.run.folders import (
    COLLECTOR_LOCK_NAME,
    COLLECTOR_LOG_NAME,
    PARQUET_FOLDER,
    REPLICA_FOLDER,
    TRACE_NAME,
    FolderLock,
    RunHeader,
)
from rankscope.run.messages import log
from rankscope.run.prepare import Collection, command_text
from rankscope.run.processes import (
    TREE_TROUBLE,
    ChildWatch,
    ExitOutcome,
    dataset_command,
    metrics_trouble,
    reader_command,
    settings_of_gathering,
    start_child,
    tree_command,
)
from rankscope.settings import FINISH_SECONDS
from rankscope.spool.replicas import replicated

_AFTER_S: Final = 3.0
_STARTS: Final = 3
_LONG_S: Final = 600.0
"""One that lived so long may be started as often again."""
_END_S: Final = 0.5
"""Whatever a kill leaves unwritten is made from the records when the tree is built."""


class ReaderProcess:
    """The process of one collector; nothing of a run depends on it."""

    def __init__(self, run_folder: Path, out: Path) -> None:
        """Start nothing yet."""
        self._command, self._out = reader_command(run_folder), out
        self._starts_left = _STARTS
        self._child: ChildWatch | None = None
        self._first_at: float | None = None
        self._started_at = 0.0

    def tend(self) -> None:
        """Start it, or start it again where it was killed; called while records come."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
        # a job that is over in seconds is not worth a process that takes one to start
        if now - self._first_at < _AFTER_S:
            return
        if self._child is not None:
            code = self._child.poll()
            if code is None:
                return
            log(f"the process beside the job's steps ended with {code}")
            self._child = None
            if now - self._started_at > _LONG_S:
                self._starts_left = _STARTS
        if not self._starts_left:
            return
        self._starts_left -= 1
        self._started_at = now
        try:
            self._child = ChildWatch(start_child(self._command, self._out))
        except OSError as error:
            log(f"the process beside the job's steps cannot be started: {error.strerror}")

    def close(self) -> None:
        """End it: the job is over, and the tree is about to be built."""
        self._starts_left = 0
        if self._child is None:
            return
        process, self._child = self._child.process, None
        # asked first: it hands waiting findings to the command of --rs-on-finding
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
        process.kill()
        process.wait()


Ended = TypeVar("Ended")
Turns = Generator[None, None, Ended]

LOOK_S = 0.05
"""How often a run is looked at that is gathered here."""
_AWAY_S = 1.0
_ORPHANS_S = 2.0
_FIRST_RELAY_S = 3600.0
"""How long to wait for the first relay: importing torch on a large cluster takes its time."""
_GONE_S = 5.0
"""So long a trace folder may be away: a disk comes back."""
_VANISHED = "a host is gone without a word: its ranks never said how they ended"


class Observer:
    """Is told how far a collector has come; this one, the daemons', does nothing about it."""

    def listening(self, addresses: Sequence[str]) -> None:
        """The collector is ready; no address: it watches a shared folder."""

    def gathering(self, streams: Mapping[StreamId, EndReason | None]) -> None:
        """These streams are known by now, and how those ended that have."""

    def quiet(self) -> None:
        """Every rank held its steps back, and nothing ever happened: there is no tree."""

    def building(self, phase: str, part: float) -> None:
        """The tree is being built."""


class Gathering:
    """The gathering of one run: its streams, then its tree, then the word to the relays."""

    def __init__(
        self,
        run_folder: Path,
        header: RunHeader,
        is_stopped: Callable[[], bool],
        observer: Observer,
        own_host: Callable[[], HostState | None],
    ) -> None:
        """Open nothing yet.

        Args:
            is_stopped: true once somebody asked for an end (SIGTERM): finish with what is there.
            own_host: as of `SharedWatch`.
        """
        self._run_folder, self._out = run_folder, header.out
        self._world_size, self._traced_ranks = header.world_size, header.collects
        self._is_stopped, self._observer = is_stopped, observer
        self._settings = settings_of_gathering(header)
        """As the ranks have them; `keys` names the collector's own file."""
        collection = Collection.of_run(header)
        self._address = header.collector if collection.is_elsewhere else ""
        """No address: the trace folder is shared."""
        is_by_hand = run_folder == header.out
        self._first_relay_s = float("inf") if is_by_hand else _FIRST_RELAY_S
        self._own_host = None if collection.is_shared or is_by_hand else own_host
        self._wait_s = LOOK_S if self._address else 0.0
        """How long a turn may wait for something to come."""

    def turns(self) -> Turns[ExitOutcome]:
        """Gather a run, build its tree, tell the relays; return how it ended. Other work of this
        process has its turn at each yield. A `collector.log` that says nothing of trouble is
        removed.

        Raises:
            FolderError: the trace folder cannot be used, or another collector is at work there.
            BindError: an address may not or cannot be listened on.
        """
        with os_errors_as(FolderError, f"{self._out}: cannot be made"):
            self._out.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder_found(self._out, "--out")
        # before anything is opened: two collectors on one folder would cut each other's replicas
        lock = FolderLock(self._out / COLLECTOR_LOCK_NAME, "collector")
        is_late = (self._out / TRACE_NAME).exists()
        source: StreamSource | None = None
        intake: Intake | None = None
        try:
            if self._address:
                file = self._settings.keys
                keys = None if file is None else read_keys(file, is_collector=True)
                source = intake = Intake(
                    self._out, (self._address,), world_size=self._world_size, keys=keys
                )
                self._observer.listening(intake.addresses)
            else:
                source = SharedWatch(self._out, self._own_host)
                self._observer.listening(())
            outcome, is_quiet = ExitOutcome.DONE, False
            if is_late:
                if intake is not None:
                    yield from self._listen(intake)
            else:
                with (
                    self._metrics(),
                    contextlib.closing(ReaderProcess(self._run_folder, self._out)) as reader,
                ):
                    decision = yield from self._gather(source, reader, lock)
                    reader.close()
                    if decision is None:
                        log(f"{self._out} was removed, or is another run's: nothing is gathered")
                        return ExitOutcome.UNFINISHED
                    outcome = yield from self._finish(source, decision)
                    is_quiet = decision is Decision.QUIET
            # behind the tree: relays remove their spools once they hear it
            source.farewell(is_quiet=is_quiet)
            source.close()  # relays need not wait for the dataset
            source = None
            has_news = intake is not None and intake.has_refused_keys
            has_dataset = yield from self._finish_dataset()
            if has_dataset and outcome is ExitOutcome.DONE and not has_news:
                (self._out / COLLECTOR_LOG_NAME).unlink(missing_ok=True)
            return outcome
        finally:
            if source is not None:
                source.close()
            if is_late and not replicated(self._out):  # what it made to listen
                shutil.rmtree(self._out / REPLICA_FOLDER, ignore_errors=True)
            lock.remove()

    def _metrics(self) -> contextlib.AbstractContextManager[None]:
        port = self._settings.metrics
        if port is None or metrics_trouble(port):  # the trouble was said when the run began
            return contextlib.nullcontext()
        # an extra: its package may be missing
        from rankscope.companion.metrics import served_metrics

        return served_metrics(self._out, port, world_size=self._world_size)

    def _finish(self, source: StreamSource, decision: Decision) -> Turns[ExitOutcome]:
        log(f"{len(source.streams())} streams, {decision.value}")
        if decision is Decision.INCOMPLETE and not any(replicated(self._out).values()):
            log("no rank sent a record: there is nothing to build a tree from")
            decision = Decision.NOTHING
        has_lost = any(
            (peer.held and not peer.quiet) or (peer.alive and peer.job is not JobState.OVER)
            for peer in source.peers()
        )
        if decision is Decision.NOTHING:
            if has_lost:
                log("a host with ranks is gone, or could not send its records: none came")
            outcome = ExitOutcome.UNFINISHED if has_lost else ExitOutcome.DONE
            return ExitOutcome.NO_ROOM if source.trouble else outcome
        if decision is Decision.QUIET:
            shutil.rmtree(self._out / REPLICA_FOLDER, ignore_errors=True)  # holds no record
            self._observer.quiet()
            log("nothing happened before which the ranks would have held steps: there is no trace")
            return ExitOutcome.DONE
        outcome = yield from self._build(source)
        has_no_room = outcome is ExitOutcome.UNFINISHED and source.trouble
        return ExitOutcome.NO_ROOM if has_no_room else outcome

    def _gather(
        self, source: StreamSource, reader: ReaderProcess, lock: FolderLock
    ) -> Turns[Decision | None]:
        started = looked = last_seen = time.monotonic()
        while True:
            yield
            source.work(self._wait_s)
            now = time.monotonic()
            if now - looked < LOOK_S:
                continue
            if now - looked > _AWAY_S:
                # this process did not run: the silence was its own, no rank is called lost for it
                source.excuse(now - looked)
            looked = now
            if lock.is_in_place():
                last_seen = now
            elif now - last_seen > _GONE_S:
                return None
            streams, peers = source.streams(), source.peers()
            self._observer.gathering(streams)
            if streams:
                reader.tend()
            if self._is_stopped():
                return Decision.INCOMPLETE if streams else Decision.NOTHING
            decision = decide(
                streams,
                peers,
                expected_ranks=self._traced_ranks,
                idle_s=now - source.progress_at,
                drain_s=self._settings.drain_seconds,
                # with trouble nothing more is taken
                finish_s=0.0 if source.trouble else self._settings.finish_seconds,
            )
            if decision is Decision.VANISHED:
                source.ask_for_last(_VANISHED)
            elif decision is not Decision.WAIT:
                return decision
            if not peers and not streams and now - started > self._first_relay_s:
                log("no relay ever came")
                return Decision.NOTHING

    def _listen(self, source: StreamSource) -> Turns[None]:
        """Relays of a collector that was killed after building still wait for its Done."""
        deadline = time.monotonic() + _ORPHANS_S
        while time.monotonic() < deadline:
            yield
            source.work(self._wait_s)

    def _build(self, source: StreamSource) -> Turns[ExitOutcome]:
        """Have another process build the tree; where that fails `rankscope recover` can do it."""
        out, started = self._out, time.monotonic()
        try:
            code = yield from self._builder(source)
            if code < 0:
                log(f"signal {-code} ended the process that builds the tree: started once more")
                code = yield from self._builder(source)
        except OSError as error:
            log(f"the process that builds the tree cannot be started: {error.strerror}")
            return ExitOutcome.UNFINISHED
        if code == 0:
            log(f"built {out / TRACE_NAME} in {time.monotonic() - started:.1f} s")
            return ExitOutcome.DONE
        if code in (ExitOutcome.NO_ROOM, ExitOutcome.UNFINISHED):  # and said why
            return ExitOutcome(code)
        log(f"the process that builds the tree ended with {code}; the records are kept in {out}")
        return ExitOutcome.UNFINISHED

    def _builder(self, source: StreamSource) -> Turns[int]:
        command = tree_command(self._out, keep_spool=self._settings.keep_spool)
        with start_child(command, self._out, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            # relays are answered meanwhile: a read that waits would make the collector look dead
            os.set_blocking(process.stdout.fileno(), False)
            watch = ChildWatch(process)
            output, code = b"", None
            while code is None:
                yield
                source.work(self._wait_s)
                code = watch.poll()  # first, so that the last words are read
                output += process.stdout.read() or b""
                *lines, output = output.split(b"\n")
                for line in lines:
                    part, _, phase = line.decode(errors="replace").partition(" ")
                    if part == TREE_TROUBLE:
                        log(phase)
                    else:
                        self._observer.building(phase, float(part))
        return code

    def _finish_dataset(self) -> Turns[bool]:
        """Have what the dataset lacks written; False where it is not whole then."""
        if not self._settings.parquet or not os.path.exists(self._out / TRACE_NAME):
            return True
        most_s = max(self._settings.finish_seconds, FINISH_SECONDS)
        deadline = time.monotonic() + most_s
        try:
            process = start_child(dataset_command(self._out), self._out)
        except OSError as error:
            trouble = f"its process cannot be started: {error.strerror}"
        else:
            while (code := process.poll()) is None and time.monotonic() < deadline:
                yield
                time.sleep(LOOK_S)
            trouble = f"its process ended with {code}" if code else ""
            if code is None:
                process.kill()
                process.wait()
                trouble = f"it took longer than {most_s:g} s"
        if trouble:
            command = f"{command_text('export', self._out, out='NEW')} --format parquet"
            log(f"{self._out / PARQUET_FOLDER} is not whole: {trouble}; a whole one: {command}")
        return not trouble
