"""The trace of one job on one host, from the launcher: made before the job, awaited after it.

job = TracedJob(settings, shape)    # folders, disk, run.json, the companion: every refusal is here
try:
    ...                             # the job, however it ends
finally:
    job.close()                     # marker, wait for the tree, the last line
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from rankscope.capture.device.fusedcache import compilers_of_host
from rankscope.capture.kernel import prepare as prepare_kernel
from rankscope.errors import RankscopeError, SettingError
from rankscope.run.agreements import held_anything
from rankscope.run.folders import (
    COLLECTOR_LOCK_NAME,
    COLLECTOR_LOG_NAME,
    COMPANION_LOG_NAME,
    LAUNCHER_LOCK_NAME,
    REPLICA_FOLDER,
    TRACE_NAME,
    FolderLock,
    is_held,
    mark_job_over,
    remove_run_folder,
    run_key,
    streams,
)
from rankscope.run.jobstatus import note_job_end
from rankscope.run.messages import progress, say
from rankscope.run.prepare import Collection, PreparedRun, RunRequest, prepare_run, remove_empty
from rankscope.run.processes import (
    companion_command,
    dataset_trouble,
    metrics_trouble,
    start_extras,
)
from rankscope.settings import Settings
from rankscope.words.joblines import JobNotices, job_verdict
from rankscope_launcher.companions import Companion
from rankscope_launcher.ending import HostPart, failure_line, shown
from rankscope_launcher.untraced import Reached, reached_by_processes, why_nothing

__all__ = ["JobShape", "TracedJob"]

_POLL_S = 0.05
_COMPANION_END_S = 5.0
"""How long the companion may take to leave once the tree is there."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""End the waiting for the tree; the job has ended by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """What the launcher knows of the job before it runs."""

    run_id: str
    """The same on every host of the run."""
    hosts: int
    local_ranks: int
    is_head: bool
    """The companion of this host gathers the run, where no collector was named."""

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.local_ranks < 1:
            raise ValueError(
                f"a job of {self.hosts} hosts with {self.local_ranks} ranks each: expected >= 1"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the whole job, as far as the launcher can tell."""
        return self.hosts * self.local_ranks


class TracedJob:
    """Folders and companion processes of one traced job on this host."""

    def __init__(self, settings: Settings, shape: JobShape) -> None:
        """Make the trace folder and this host's run folder, say where the trace goes, start the
        companion, and set the variables by which ranks know of it.

        Raises:
            SettingError: several hosts, but no folder or collector they have in common.
            BindError: the collector's address may not be used.
            KeysError: the keys cannot be used.
            FolderError: the trace folder cannot be used.
            SpoolError: the spool folder cannot be used, or a disk has no room.
            OSError: the companion cannot be started.
        """
        prepared = _prepared(settings, shape)
        out, folder = prepared.out, prepared.run_folder
        self._life = FolderLock(folder / LAUNCHER_LOCK_NAME, "launcher")
        self._settings = settings
        self._shape = shape
        self._verdict = ""
        self._made = prepared.new_folders
        self._is_over = self._has_dataset = False
        self._reached: list[Reached] = []
        say(prepared.announcement)
        gathers = _must_gather(shape, prepared)
        if gathers:
            lacking = dataset_trouble() if settings.parquet else ""
            self._has_dataset = settings.parquet and not lacking
            port = settings.metrics  # that it cannot be had is no reason not to train
            for trouble in (lacking, "" if port is None else metrics_trouble(port)):
                if trouble:
                    say(trouble)
        self._part = HostPart(
            out=out,
            run_folder=folder,
            collection=prepared.collection,
            steps=settings.steps,
            gathers=gathers,
            companion=Companion(
                companion_command(folder),
                out / COLLECTOR_LOG_NAME if gathers else folder / COMPANION_LOG_NAME,
                folder,
                JobNotices(out, shown(out), say, folder).look,
            ),
        )
        os.environ.update(RANKSCOPE="1", RANKSCOPE_RUN_FOLDER=str(folder))

    def finish(self, error: BaseException | None = None) -> str:
        """Tell the companion that the job is over, wait for the tree as long as settings allow;
        return the line that says where it is, "" the second time.

        Args:
            error: what left torchrun; None where the job did not fail.
        """
        part, companion = self._part, self._part.companion
        if self._is_over:
            return ""
        self._is_over = True
        companion.leave_to_caller()
        with _signals_noted() as is_hurried:
            self._life.release()
            if part.run_folder.is_dir():  # else all in it was sent, the companion has left
                if not part.collection.is_elsewhere:
                    note_job_end(part.out, error)
                mark_job_over(part.run_folder)
            self._reached = reached_by_processes(part.run_folder)
            untraced = why_nothing(self._reached, error)
            if self._nothing_came():
                self._stop(companion)
                return untraced
            part.was_held = held_anything(part.run_folder)
            self._wait(companion, is_hurried)
            line = part.last_line(untraced)
            if part.was_held and not (part.out / TRACE_NAME).exists():
                remove_empty(self._made)
            if part.has_tree() or not (companion.is_at_work() or part.has_no_room()):
                self._tidy(companion)
            log = part.out / COLLECTOR_LOG_NAME
            has_finished = part.has_tree() and part.gathers
            if has_finished and self._has_dataset and log.exists():
                say(f"the dataset is not whole: see {shown(log)}")
            if has_finished:
                most_s = self._settings.finish_seconds
                with progress() as show:
                    tick = functools.partial(show, "judging the trace", None)
                    self._verdict = job_verdict(part.out, shown(part.out), most_s, is_hurried, tick)
            return line

    def _wait(self, companion: Companion, is_hurried: Callable[[], bool]) -> None:
        """Wait for the tree, or for the records to have left where it is built elsewhere; a dataset
        is whole when the companion has left.
        """
        part = self._part
        deadline = time.monotonic() + self._settings.finish_seconds
        with progress() as show:
            while companion.is_at_work():
                if time.monotonic() >= deadline or is_hurried():
                    return
                if part.gathers and part.has_tree() and not self._has_dataset:
                    return
                companion.tend()
                show("finishing the trace", None)
                time.sleep(_POLL_S)

    def _nothing_came(self) -> bool:
        """True where no rank of the whole run ever opened a spool."""
        part = self._part
        return self._shape.hosts == 1 and part.run_folder.is_dir() and not part.has_records()

    def _stop(self, companion: Companion) -> None:
        out = self._part.out
        companion.stop()
        self._tidy(companion)
        if self._part.gathers:
            shutil.rmtree(out / REPLICA_FOLDER, ignore_errors=True)
            for name in (COLLECTOR_LOCK_NAME, COLLECTOR_LOG_NAME):
                (out / name).unlink(missing_ok=True)
            remove_empty(self._made)

    def _tidy(self, companion: Companion) -> None:
        """Remove this host's run folder once nobody writes there and every record has gone."""
        folder = self._part.run_folder
        if not companion.wait(_COMPANION_END_S):
            return
        if folder.is_dir() and not (streams(folder) or held_anything(folder)):
            shutil.rmtree(folder, ignore_errors=True)
            remove_run_folder(folder)

    def close(
        self, speak: Callable[[str], object] = say, error: BaseException | None = None
    ) -> None:
        """Finish; what goes wrong on the way is said, never raised: the job's end stays its own.

        Args:
            speak: takes the last lines, now or later: how the job failed, where the trace is.
            error: what left torchrun; None where the job did not fail.
        """
        from rankscope.agent.guard import attempt, text_of  # loads torch, as the job has by now

        lines: list[str] = []
        problem = attempt(lambda: lines.extend((self.finish(error), self._verdict)))
        if problem is not None:
            why = str(problem) if isinstance(problem, RankscopeError) else text_of(problem)
            lines = [f"the trace in {self._part.out} was not finished: {why}"]
        if any(lines):
            attempt(lambda: lines.insert(0, failure_line(error, self._part.out, self._reached)))
            for each in filter(None, lines):
                speak(each)


def _prepared(settings: Settings, shape: JobShape) -> PreparedRun:
    """Prepare the run on this host; errors are those of a `TracedJob`."""
    collection = Collection.of_setting(settings.collector, is_one_host=shape.hosts == 1)
    collection.check(settings.keys)
    if collection.is_shared and shape.hosts > 1 and settings.out is None:
        raise SettingError(
            f"{shape.hosts} hosts: expected one trace folder that all of them see; "
            "give every host the same --rs-out, on a shared disk"
        )
    traced_ranks = settings.traced_of(shape.world_size)
    if not traced_ranks:
        raise SettingError(f"--rs-ranks selects none of the {shape.world_size} ranks of this job")
    prepare_kernel(say)  # before any rank runs: they only load it
    for complaint in start_extras(compilers_of_host()):
        say(f"{complaint}: torch operations take the digests on GPUs, which is slower")
    launch = f"{shape.run_id}/{os.uname().nodename}/{os.getpid()}/{time.time_ns()}"
    return prepare_run(
        RunRequest(
            run_id=shape.run_id,
            key=run_key(launch),
            collection=collection,
            world_size=shape.world_size,
            local_ranks=shape.local_ranks,
            settings=settings,
            collects=traced_ranks if shape.is_head and not collection.is_elsewhere else 0,
        )
    )


def _must_gather(shape: JobShape, prepared: PreparedRun) -> bool:
    if not shape.is_head or prepared.collection.is_elsewhere:
        return False
    # held: a collector that was started by hand finishes the run, or another host does
    return not (prepared.collection.is_shared and is_held(prepared.out / COLLECTOR_LOCK_NAME))


def train_untraced(error: Exception, worded: Callable[[str], str] = str) -> None:
    """Say why nothing is traced, and have the ranks train; `worded` names settings as they were
    given.
    """
    from rankscope.agent.guard import text_of

    os.environ["RANKSCOPE"] = "0"  # nor shall the ranks try on their own
    is_ours = isinstance(error, (RankscopeError, OSError, ValueError))
    say(worded(f"not tracing: {error if is_ours else text_of(error)}"))


def new_run_id() -> str:
    """Return a name for a run nobody else has named."""
    return uuid.uuid4().hex


@contextmanager
def _signals_noted() -> Iterator[Callable[[], bool]]:
    """Note signals instead of obeying them: the job has ended, and its exit code stays its own."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: bool(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
