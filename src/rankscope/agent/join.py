"""Joining the run: who this rank is, which life, its spool, and who waits for the tree."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import rankscope
from rankscope.agent.blackboxwatch import BlackBoxWatch
from rankscope.agent.firstrank import (
    ELASTIC_RUN,
    agree_on_life,
    find_agents_store,
    find_or_prepare_run,
    has_companion,
    restart_companion,
)
from rankscope.agent.guard import say
from rankscope.agent.identity import identify, restarts_left
from rankscope.agent.recorder import Recorder
from rankscope.agent.session import OpenedSpool
from rankscope.agent.steps.chosen import Agreement
from rankscope.agent.values.tensorstore import make_tensor_store
from rankscope.errors import LayoutError, SpoolError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.ranks import MAX_INCARNATIONS, EndReason, RankIdentity, StreamId
from rankscope.record.texts import without_secrets
from rankscope.run.agreements import EventBoard, agreement_folder, event_folder, shared_folder
from rankscope.run.files import own_subfolder
from rankscope.run.folders import (
    HELD_FOLDER,
    ORDER_NAME,
    STEP_TRIGGER_FOLDER,
    TRACE_NAME,
    RunHeader,
    read_run_header,
    stream_folder,
    streams,
)
from rankscope.run.prepare import QUIET, Collection, announcement, command_text, recover_command
from rankscope.run.processes import is_alive, started_at
from rankscope.settings import SETTINGS, Settings, settings_from
from rankscope.spool.recordformat import FORMAT_VERSION
from rankscope.spool.ringwriter import RingWriter
from rankscope.spool.writer import SpoolWriter
from rankscope.words.joblines import job_verdict

RUN_FOLDER_VARIABLE = "RANKSCOPE_RUN_FOLDER"
"""Set by a launcher that has prepared the run folder and started the companion itself."""
_POLL_S = 0.05
_COMPANION_S = 1.0
"""How often the rank that waits for the tree asks whether its companion lives."""
_LAYOUT_PIECE_CHARACTERS = 8192
_ENVIRONMENT_SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_DEBUG",
    "TORCH_DISTRIBUTED_DEBUG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHELASTIC_RUN_ID",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRun(OpenedSpool):
    """A rank that takes part in a run."""

    out: Path
    finish_seconds: float
    collection: Collection
    must_wait: bool
    """True on the one rank that speaks for the run, unless a launcher waits for the tree."""
    holds_back: bool
    """Only the last steps become a trace, and only after an event."""

    def wait_for_tree(self, reason: EndReason) -> bool:
        """Poll for `trace.json`, at most `finish_seconds`; True where it is there. Nobody waits
        where an elastic agent may start the ranks again, nor after an exception: ranks that hang in
        a collective only learn of it when this process is gone."""
        if not self.must_wait:
            return False
        if self.collection.is_elsewhere:
            at = self.collection.address
            say(f"records go to the collector at {at}, which writes the tree")
            return False
        if restarts_left() or (reason is EndReason.RAISED and self.identity.world_size > 1):
            say(f"the trace follows in {self.out}; read it then: {command_text('show', self.out)}")
            return False
        began, run_folder, starts_left = time.monotonic(), self._run_folder, 1
        looked = began
        while not (self.out / TRACE_NAME).exists():
            if self.holds_back and self._has_run_gone():
                say(QUIET)
                return False
            now, is_dead = time.monotonic(), False
            if now - looked > _COMPANION_S:
                looked = now
                is_dead = run_folder.exists() and not has_companion(run_folder)
                if is_dead and starts_left and self.out.exists():
                    is_dead, starts_left = not restart_companion(run_folder), starts_left - 1
            if is_dead or now - began > self.finish_seconds:
                cause = "its companion ended" if is_dead else f"after {self.finish_seconds:g} s"
                say(
                    f"no tree in {self.out}, {cause}; build it from the records: "
                    f"{recover_command(run_folder, self.out, out=self.out)}"
                )
                return False
            time.sleep(_POLL_S)
        say(announcement(self.out))
        if sys.stderr is not None and sys.stderr.isatty():
            verdict = job_verdict(self.out, str(self.out), self.finish_seconds)
            if verdict:
                say(verdict)
        return True

    @property
    def _run_folder(self) -> Path:
        folder = self.writer.folder  # a black box has its streams in a folder of their own
        return folder.parents[1] if self.holds_back else folder.parent

    def _has_run_gone(self) -> bool:
        is_written = self.out.is_dir() and any(self.out.iterdir())
        return not self._run_folder.exists() and not is_written


def who_am_i() -> RankIdentity:
    """Return who this process is; the process group wins once it exists."""
    group = None
    if dist.is_available() and dist.is_initialized():
        group = (dist.get_rank(), dist.get_world_size())
    return identify(group)


def settings_here(keywords: Mapping[str, object] | None) -> Settings:
    """Return the settings: from keywords, then `run.json` of a prepared run, else variables. Raises
    RankscopeError if a setting or `run.json` is unreadable."""
    prepared = os.environ.get(RUN_FOLDER_VARIABLE)
    if not prepared:
        return settings_from(keywords)
    texts = read_run_header(Path(prepared)).settings
    return settings_from(keywords, {s.variable: texts[s.name] for s in SETTINGS if s.name in texts})


def join_run(settings: Settings) -> JoinedRun | None:
    """Open this rank's spool in its run; None if the rank is not selected, or a parent process
    traces as the same rank. Raises RankscopeError if the spool or the trace folder is unusable."""
    identity = who_am_i()
    is_selected = settings.ranks is None or identity.rank in settings.ranks
    prepared = os.environ.get(RUN_FOLDER_VARIABLE)
    if not is_selected:
        if not prepared and identity.rank == 0 and settings.traced_of(identity.world_size):
            # it starts the head's collector, for the ranks that are
            find_or_prepare_run(settings, identity)
        return None
    run_folder = Path(prepared) if prepared else find_or_prepare_run(settings, identity)
    header = read_run_header(run_folder)
    collection = Collection.of_run(header)
    spools = own_subfolder(run_folder / HELD_FOLDER) if settings.steps.last else run_folder
    earlier = [stream for stream in streams(spools) if stream.rank == identity.rank]
    if any(is_alive(stream_folder(spools, stream)) for stream in earlier):
        return None  # a child that inherited RANK
    identity = replace(identity, incarnation=_life(identity, earlier))
    # a folder without records counts too: its rank died before it had written any
    while stream_folder(spools, identity.stream).exists():
        if identity.incarnation + 1 >= MAX_INCARNATIONS:
            raise SpoolError(f"{spools}: there are records of every life that a rank may have")
        identity = replace(identity, incarnation=identity.incarnation + 1)
    board = EventBoard(event_folder(run_folder, header, identity.incarnation))
    speaks = identity.rank == min(settings.ranks or (0,))
    folder = stream_folder(spools, identity.stream)
    writer, recorder = _open_spool(settings, identity, folder, board, speaks=speaks)
    define_rank(recorder, identity, header.run_id, settings)
    world, local_size = settings.traced_of(identity.world_size), identity.local_world_size
    # kept tensors go where this host sees the trace folder, else from the run folder by the relay
    chunk_folder = run_folder if collection.is_elsewhere else header.out
    chunk_writers = world if collection.is_shared and not header.keeps_apart else local_size
    return JoinedRun(
        identity=identity,
        writer=writer,
        recorder=recorder,
        agreement=_agreement(settings, identity, run_folder, header),
        make_tensor_store=lambda: make_tensor_store(
            settings, recorder, chunk_folder, identity.stream, chunk_writers
        ),
        is_launched=bool(prepared),
        out=header.out,
        finish_seconds=settings.finish_seconds,
        collection=collection,
        holds_back=settings.steps.last > 0,
        must_wait=not prepared and speaks and not header.keeps_apart,
    )


def _open_spool(
    settings: Settings, identity: RankIdentity, folder: Path, board: EventBoard, *, speaks: bool
) -> tuple[SpoolWriter, Recorder]:
    """Open the spool of this rank; `speaks`: it says what concerns all ranks."""
    if not settings.steps.last:
        writer = SpoolWriter(folder, limit_bytes=settings.spool_bytes)
        return writer, Recorder(writer)
    ring = RingWriter(
        folder, limit_bytes=settings.spool_bytes, steps=settings.steps.last, board=board
    )
    recorder = Recorder(ring)
    BlackBoxWatch(recorder, ring, settings.steps, board, identity.rank, say if speaks else None)
    return ring, recorder


def _life(identity: RankIdentity, earlier: Sequence[StreamId]) -> int:
    """Return the number of this life of the rank: the one that hosts agree on, if there are
    several. Else the count of this host's agent, or the first without records here: after another
    program, or a restart that another host began."""
    free = max((stream.incarnation + 1 for stream in earlier), default=0)
    if ELASTIC_RUN in os.environ and identity.world_size > identity.local_world_size:
        store = find_agents_store()
        if store is not None:
            return agree_on_life(store, at_least=free, started_at=started_at())
    return max(identity.incarnation, free)


def _agreement(
    settings: Settings, identity: RankIdentity, run_folder: Path, header: RunHeader
) -> Agreement:
    life = identity.incarnation
    is_alone = settings.traced_of(identity.world_size) == 1
    folder = shared_folder(run_folder, header)
    return Agreement(
        is_alone=is_alone,
        is_distant=identity.local_world_size < identity.world_size,
        for_touches=None if is_alone else folder / f"{STEP_TRIGGER_FOLDER}.{life}",
        for_orders=agreement_folder(run_folder, header, life),
        order_file=run_folder / ORDER_NAME,
    )


def define_rank(
    recorder: Recorder, identity: RankIdentity, run_id: str, settings: Settings
) -> None:
    """Write the first record of a stream: rank, host and environment."""
    recorder.define(
        "rank",
        format=FORMAT_VERSION,
        run_id=run_id,
        **asdict(identity),
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        versions={
            "rankscope": rankscope.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        argv=[text[:500] for text in without_secrets(sys.argv[:50])],
        settings=settings.as_recorded(),
        environment={name: os.environ[name] for name in _ENVIRONMENT_SHOWN if name in os.environ},
    )
    if settings.layout is not None:
        _define_layout(recorder, identity, settings.layout)


def _define_layout(recorder: Recorder, identity: RankIdentity, layout: LayoutFile) -> None:
    for at in range(0, max(len(layout.text), 1), _LAYOUT_PIECE_CHARACTERS):
        recorder.define(
            "layout", file=layout.name, text=layout.text[at : at + _LAYOUT_PIECE_CHARACTERS]
        )
    try:
        if identity.world_size > 1:
            layout.mesh(identity.world_size)
    except LayoutError as error:
        if identity.rank == 0:
            say(f"{error}: it is not used")
