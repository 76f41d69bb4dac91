"""The trace of one job on one host, from the launcher: made before the job, awaited after it.

job = TracedJob.prepare(settings, shape)    # folders, disk, run.json: every refusal is here
job.start()                                 # relay and collector
with job:
    ...                                     # the job, however it ends
                                            # then: marker, wait for the tree, the last line
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rankscope.agent.settings import SETTINGS, Settings
from rankscope.capture.kernel import build as build_kernel
from rankscope.errors import FolderError, RankscopeError, SettingError
from rankscope.gather.address import check_address
from rankscope.spool.companions import (
    collector_command,
    companion_environment,
    ipc_address,
    relay_command,
)
from rankscope.spool.folder import (
    COLLECTOR_LOCK_NAME,
    LAUNCHER_LOCK_NAME,
    RELAY_LOG_NAME,
    SHARED,
    FolderLock,
    RunHeader,
    check_free_space,
    host_run_folder,
    is_held,
    mark_job_over,
    remove_run_folder,
    run_key,
    spool_base,
    streams,
    write_run_header,
)
from rankscope.spool.outfolder import (
    COLLECTOR_LOG_NAME,
    claim_out,
    default_out,
    prepare_out,
)
from rankscope_launcher.progress import Progress, say

__all__ = ["JobShape", "TracedJob"]

TREE_NAME = "trace.json"
_BUSY = 2
"""Exit code of a collector that could not start, because another one owns the folder."""
_POLL_S = 0.05
_COMPANION_END_S = 5.0
"""How long the relay and the collector may take to leave once the tree is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """What the launcher knows of the job before it runs."""

    run_id: str
    """The same on every host of the run."""
    hosts: int
    local_ranks: int
    is_head: bool
    """This host holds the collector."""

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

    def __init__(
        self, settings: Settings, shape: JobShape, out: Path, run_folder: Path, address: str
    ) -> None:
        self._life = FolderLock(run_folder / LAUNCHER_LOCK_NAME, "launcher")
        self._settings = settings
        self._shape = shape
        self._out = out
        self._run_folder = run_folder
        self._address = address
        self._relay: subprocess.Popen[bytes] | None = None
        self._collector: subprocess.Popen[bytes] | None = None
        self._is_over = False

    @classmethod
    def prepare(cls, settings: Settings, shape: JobShape) -> TracedJob:
        """Make the trace folder and this host's run folder; nothing is started yet.

        Raises:
            SettingError: several hosts, but no folder or collector they have in common.
            FolderError: the trace folder cannot be used.
            BindError: the collector's address is not one of this host.
            SpoolError: the spool folder cannot be used, or its disk is too full.
        """
        is_shared = settings.collector == SHARED or (shape.hosts > 1 and not settings.collector)
        if settings.collector and not is_shared:
            check_address(settings.collector)
        if is_shared and shape.hosts > 1 and settings.out is None:
            raise SettingError(
                f"{shape.hosts} hosts: expected one trace folder that all of them see; "
                "give every host the same --rs-out, on a shared disk"
            )
        if not settings.traced_of(shape.world_size):
            raise SettingError(
                f"--rs-ranks selects none of the {shape.world_size} ranks of this job"
            )
        base = spool_base(settings.spool)
        build_kernel()  # before any rank runs: they only load it
        check_free_space(base, settings.spool_bytes * shape.local_ranks)
        out = settings.out or default_out()
        launch = f"{shape.run_id}/{os.uname().nodename}/{os.getpid()}/{time.time_ns()}"
        run_folder = host_run_folder(base, run_key(launch))
        address = SHARED if is_shared else settings.collector or ipc_address(run_folder)
        try:
            if is_shared:
                claim_out(out)
            elif not settings.collector:
                prepare_out(out)
        except FolderError:
            remove_run_folder(run_folder)
            raise
        header = RunHeader(
            run_id=shape.run_id,
            out=out,
            collector=address,
            world_size=shape.world_size,
            settings=settings.as_text(),
        )
        write_run_header(run_folder, header)
        return cls(settings, shape, out, run_folder, address)

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables the ranks need; `given`: settings of the command line, as text."""
        variables = {s.variable: given[s.field] for s in SETTINGS if s.field in given}
        if self._settings.spool is not None:
            variables["RANKSCOPE_SPOOL"] = str(self._settings.spool)
        if not self._is_collected_elsewhere:
            variables["RANKSCOPE_OUT"] = str(self._out)
        return {
            **variables,
            "RANKSCOPE": "1",
            "RANKSCOPE_RUN_FOLDER": str(self._run_folder),
        }

    @property
    def _is_collected_elsewhere(self) -> bool:
        return self._settings.collector not in {"", SHARED}

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the relay, and on the head host the collector, unless one was named by address."""
        folder = self._run_folder
        self._relay = _start(relay_command(folder), folder / RELAY_LOG_NAME, folder)
        if not self._shape.is_head or self._is_collected_elsewhere:
            return
        if self._address == SHARED and is_held(self._out / COLLECTOR_LOCK_NAME):
            return  # one that was started by hand: it finishes the run
        command = collector_command(
            self._out,
            bind=() if self._address == SHARED else (self._address,),
            world_size=self._shape.world_size,
            traced_ranks=self._settings.traced_of(self._shape.world_size),
            keep_spool=self._settings.keep_spool,
            drain_seconds=self._settings.drain_seconds,
            finish_seconds=self._settings.finish_seconds,
        )
        self._collector = _start(command, self._out / COLLECTOR_LOG_NAME, folder)

    def finish(self) -> None:
        """Say the job is over, wait for the tree as long as settings allow, print where it is."""
        if self._is_over or self._relay is None:
            return
        self._is_over = True
        self._life.release()
        if self._run_folder.is_dir():  # else everything in it was shipped, and the relay has left
            mark_job_over(self._run_folder)
        if self._nothing_came():
            self._stop()
            say(
                "nothing was traced: no rank called a torch module, or rankscope is not installed "
                "in the ranks' Python"
            )
            return
        if self._address == SHARED and self._collector and self._collector.poll() == _BUSY:
            self._collector = None  # two hosts of the run on one machine: the other one collects
        waiting_for = self._collector or self._relay
        tree = self._out / TREE_NAME
        with Progress("finishing the trace") as progress:
            deadline = time.monotonic() + self._settings.finish_seconds
            while waiting_for.poll() is None and time.monotonic() < deadline:
                if self._collector is not None and tree.exists():
                    break
                progress.tick()
                time.sleep(_POLL_S)
        say(self._last_line(tree))
        self._tidy()

    def _nothing_came(self) -> bool:
        """True where no rank of the whole run ever opened a spool."""
        if self._shape.hosts > 1 or not self._run_folder.is_dir():
            return False
        folders = [f for f in (self._run_folder, self._out / "spool") if f.is_dir()]
        return not any(path.name.startswith("rank") for f in folders for path in f.iterdir())

    def _stop(self) -> None:
        for companion in (self._relay, self._collector):
            if companion is not None:
                companion.terminate()
        self._tidy()

    def _last_line(self, tree: Path) -> str:
        if self._is_collected_elsewhere:
            if self._relay is not None and self._relay.poll() == 0:
                return f"records went to the collector at {self._address}, which writes the tree"
            return (
                f"the collector at {self._address} has not finished the trace; what it has not "
                f"taken by then stays in {self._run_folder}"
            )
        if tree.exists():
            return f"trace in {self._out}; read it: rankscope show {_shown(self._out)}"
        if self._collector is None:
            return f"the records of this host are in {self._out}; its collector builds the tree"
        recover = (
            f"rankscope recover {_shown(self._run_folder)} --out {_shown(self._out)}-recovered"
        )
        code = self._collector.poll()
        if code is None:
            return (
                f"no tree in {self._out} after {self._settings.finish_seconds:g} s, the collector "
                f"is still at it; wait, or: {recover}"
            )
        return (
            f"no tree in {self._out}: the collector ended with code {code} "
            f"(see {self._out / COLLECTOR_LOG_NAME}); build it from the spools: {recover}"
        )

    def _tidy(self) -> None:
        """Remove this host's run folder once nobody writes there and every record has gone."""
        deadline = time.monotonic() + _COMPANION_END_S
        for companion in (self._relay, self._collector):
            while companion is not None and companion.poll() is None:
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)
        if self._run_folder.is_dir() and not streams(self._run_folder):
            shutil.rmtree(self._run_folder, ignore_errors=True)
            remove_run_folder(self._run_folder)

    def close(self) -> None:
        """Finish; what goes wrong on the way is said, never raised: the job's end stays its own."""
        try:
            self.finish()
        except (RankscopeError, OSError) as problem:
            say(f"the trace in {self._out} was not finished: {problem}")

    def __enter__(self) -> TracedJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def new_run_id() -> str:
    """Return a name for a run nobody else has named."""
    return uuid.uuid4().hex


def _start(command: list[str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start a companion in its own session, so that Ctrl-C in the terminal ends the job alone."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(log, flags, 0o600)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=companion_environment(),
            cwd=folder,  # `-m` puts it on the module path: a folder that only this user writes
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
