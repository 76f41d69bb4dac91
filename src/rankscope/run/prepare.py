"""How the launcher, the first rank, or one process that traces a block prepare a run on one host:
they make the trace folder and the host's run folder once the disks have room for what ranks may
write, and say in `run.json` where the records are collected."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rankscope.errors import KeysError
from rankscope.run.address import check_address, is_tcp
from rankscope.run.filenames import REPLICA_FOLDER
from rankscope.run.folders import (
    SHARED,
    RunHeader,
    check_free_space,
    host_run_folder,
    spool_base,
    write_run_header,
)
from rankscope.run.keyfile import CurveKeys, read_keys
from rankscope.run.outfolder import default_out, missing_folders, named_out, remove_empty, take_out
from rankscope.run.processes import process_name
from rankscope.settings import Settings


@dataclass(frozen=True, slots=True)
class Collection:
    """Where the records of a run are collected: one of three ways."""

    address: str
    """"" for a job of this host alone; `SHARED` where every host writes into the trace folder
    itself; else the address of a collector that somebody started, with a trace folder of its own.
    """

    @classmethod
    def asked(cls, setting: str, *, is_one_host: bool = True) -> Collection:
        """Return what the setting `collector` asks for; "" means whatever all hosts can reach."""
        return cls(setting or ("" if is_one_host else SHARED))

    @classmethod
    def of_run(cls, header: RunHeader) -> Collection:
        """Return what `run.json` says."""
        return cls(header.collector)

    def check(self, keys: Path | None) -> CurveKeys | None:
        """See that records may be sent there, before anything is made; return the keys for that.
        Raise BindError for the address, KeysError for the keys."""
        if keys is not None and not is_tcp(self.address):
            raise KeysError(
                f"{keys}: keys are those of a collector on TCP, and none is named",
                "name it with --rs-collector tcp://HOST:PORT, or leave --rs-keys away",
            )
        found = None if keys is None else read_keys(keys, is_collector=False)
        if self.is_elsewhere:
            check_address(self.address, has_keys=keys is not None)
        return found

    @property
    def is_shared(self) -> bool:
        """True where every host writes into the trace folder by itself."""
        return self.address == SHARED

    @property
    def is_elsewhere(self) -> bool:
        """True where the trace folder is the collector's affair, maybe on another host."""
        return self.address not in ("", SHARED)

    def announcement(self, out: Path, asked: Path | None = None) -> str:
        """Return what is said of a run before it begins; `asked`: the folder that was asked for."""
        if self.is_elsewhere:
            return f"tracing to the collector at {self.address}"
        return f"{asked} is not empty: tracing into {out}" if asked else f"tracing into {out}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What a run needs on this host."""

    run_id: str
    key: str
    collection: Collection
    world_size: int
    local_ranks: int
    settings: Settings
    """Its `out` may have `%j` in it, or be None for a folder of a new name."""
    max_restarts: int = 0
    agent: str = ""
    collects: int = 0
    keeps_apart: bool = False
    """These four stand in `run.json` as they are (`RunHeader`)."""
    is_joined: bool = False
    """The trace folder is there: the head host of the run made it."""
    has_relay: bool = True
    """False for one process that reads its own spool: nobody would read `run.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run as it was prepared on this host."""

    out: Path
    run_folder: Path
    collection: Collection
    announcement: str
    made: Sequence[Path]
    undo: ExitStack

    def remove(self) -> None:
        """Remove the run folder with all in it, and what else was made and is empty."""
        shutil.rmtree(self.run_folder, ignore_errors=True)
        self.undo.close()


def _remove_made(made: Sequence[Path]) -> None:
    if made and made[0].name == REPLICA_FOLDER:
        shutil.rmtree(made[0], ignore_errors=True)
    remove_empty(made)


def prepare_run(
    request: RunRequest, announce: Callable[[Path, str], object] = lambda out, line: None
) -> PreparedRun:
    """Make the trace folder and the run folder of a run; start nothing. `announce` is told of the
    trace folder once it can be used, before `run.json` lets anybody in. Raise FolderError or
    SpoolError where a folder cannot be used or a disk has no room, and leave nothing behind."""
    with ExitStack() as undo:
        collection, settings = request.collection, request.settings
        base = spool_base(settings.spool)
        # the others need no room; which of them this host has is not known, so all of its ranks
        traced_ranks = settings.traced_of(request.world_size)
        local_ranks = min(request.local_ranks, traced_ranks)
        check_free_space(base, settings.spool_bytes * local_ranks)
        asked = out = named_out(settings.out or default_out(), request.run_id)
        is_of_all = collection.is_shared and not request.keeps_apart
        if settings.tensors and settings.tensor_budget is not None:
            place = base if collection.is_elsewhere else out
            ranks = traced_ranks if is_of_all else local_ranks
            each = f"{settings.tensor_budget >> 20} MiB of full tensors each"
            check_free_space(
                place,
                settings.tensor_budget * ranks,
                f"{ranks} ranks may keep {each}",
                "give less with --rs-tensor-budget, or another disk with --rs-out",
            )
        undo.callback(remove_empty, missing_folders(base / request.key))
        run_folder = host_run_folder(base, request.key)
        made: Sequence[Path] = ()
        if not (collection.is_elsewhere or request.is_joined):
            maker = request.agent or process_name(os.getpid()) if request.has_relay else ""
            out, made = take_out(asked, request.run_id, maker=maker, is_shared=is_of_all)
            undo.callback(_remove_made, made)
            settings = replace(settings, out=out)
        announcement = collection.announcement(out, None if out == asked else asked)
        if settings.steps.last:
            announcement += ", once something happens"
        announce(out, announcement)
        if request.has_relay:
            header = RunHeader(
                run_id=request.run_id,
                out=out,
                collector=collection.address,
                world_size=request.world_size,
                settings=settings.as_text(),
                max_restarts=request.max_restarts,
                agent=request.agent,
                collects=request.collects,
                keeps_apart=request.keeps_apart,
            )
            write_run_header(run_folder, header)
        return PreparedRun(
            out=out,
            run_folder=run_folder,
            collection=collection,
            announcement=announcement,
            made=made,
            undo=undo.pop_all(),
        )
