"""Keeping full tensors in a session: where a rank's chunks go, how large they may become, and the
path each call stands for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rankscope.agent.guard import say
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.bytestores import LocalChunkStore, Store
from rankscope.agent.values.tensorstore import TensorStore, free_disk_share
from rankscope.chunks.writing import ChunkWriter
from rankscope.record.call import Mode
from rankscope.record.collective import Collective
from rankscope.record.phases import Phase
from rankscope.record.streams import RankIdentity, StreamId
from rankscope.run.folders import RunHeader
from rankscope.run.prepare import Collection
from rankscope.settings import Settings
from rankscope.spool.writer import SpoolWriter

__all__ = [
    "PathRecorder",
    "chunk_store",
    "make_recorder",
    "make_tensor_store",
    "tensor_store_of_run",
]

_CALLS_REMEMBERED: Final = 1 << 14
"""At least so many of the latest calls, a few MB."""
_MODULES_REMEMBERED: Final = 1 << 16
"""The paths of so many modules: programs may make modules for ever."""


class PathRecorder(Recorder):
    """A recorder that knows which path a call was made of: what to keep is asked for by path.

    Calls of steps before are remembered too, some thousands of them: gradients of their graphs may
    still come, and where threads call roots beside each other, one ends the step of another's call.
    """

    def __init__(self, writer: SpoolWriter) -> None:
        super().__init__(writer)
        self._path_of_module: dict[int, str] = {}
        self._modules: dict[int, int] = {}
        self._modules_before: dict[int, int] = {}

    def define(self, kind: str, **fields: object) -> int:
        """Commit a definition and return its number."""
        number = super().define(kind, **fields)
        if kind == "module":
            self._path_of_module[number] = str(fields["path"])
            if len(self._path_of_module) > _MODULES_REMEMBERED:
                del self._path_of_module[next(iter(self._path_of_module))]
        return number

    def enter(
        self,
        module: int,
        root: int,
        parent: int | None,
        mode: Mode,
        step: int,
        micro_batch: int | None,
        phase: Phase,
        ordinal: int,
        time_ns: int = 0,
    ) -> int:
        """Record that a call began; return its sequence number."""
        sequence = super().enter(
            module, root, parent, mode, step, micro_batch, phase, ordinal, time_ns
        )
        self._modules[sequence] = module
        return sequence

    def enter_collective(
        self,
        place: tuple[int, int, int | None, Mode, int, int | None],
        ordinal: int,
        collective: Collective,
        number: int,
    ) -> int:
        """Record that a collective is about to be issued; return its sequence number."""
        sequence = super().enter_collective(place, ordinal, collective, number)
        self._modules[sequence] = place[0]
        return sequence

    def path_of(self, sequence: int) -> str | None:
        """Return the path of the module a call of this step or the last was made of."""
        module = self._modules.get(sequence) or self._modules_before.get(sequence)
        return None if module is None else self._path_of_module.get(module)

    def end_step(self) -> None:
        """Forget the calls before those of this step, where they are many."""
        if len(self._modules) >= _CALLS_REMEMBERED:
            self._modules, self._modules_before = {}, self._modules


def make_recorder(writer: SpoolWriter, settings: Settings) -> Recorder:
    """Return the pen of a block; it notes paths only where tensors are kept."""
    return PathRecorder(writer) if settings.tensors else Recorder(writer)


def make_tensor_store(
    settings: Settings,
    recorder: Recorder,
    folder: Path,
    stream: StreamId,
    *,
    writers: int,
    store: Store | None = None,
    is_late: bool = False,
) -> TensorStore | None:
    """Return what keeps the full tensors of one rank; None where none were asked for.

    Args:
        settings: which, and within what bounds.
        recorder: writes their records, and why any are not kept.
        folder: takes the chunks: the trace folder, or where that is not seen the run folder.
        stream: whose they are.
        writers: ranks that keep tensors on that disk, for the default budget.
        store: takes them instead of the chunks, where this process reads the trace itself.
        is_late: it is made because tensors are asked for that the settings do not name.
    """
    if not settings.tensors and not is_late:
        return None
    return TensorStore(
        settings.tensors or (),
        store or chunk_store(settings, recorder, folder, stream, writers=writers),
        recorder.tensor,
        memory_bytes=settings.tensor_memory,
        tell=lambda text: say(f"rank {stream.rank}: {text}"),
        note=recorder.not_kept,
    )


def chunk_store(
    settings: Settings, recorder: Recorder, folder: Path, stream: StreamId, *, writers: int
) -> Store:
    """Return what puts tensors into chunks; arguments as `make_tensor_store` takes them."""
    budget = settings.tensor_budget
    limit_bytes = free_disk_share(folder, writers) if budget is None else budget
    return LocalChunkStore(ChunkWriter(folder, stream, limit_bytes=limit_bytes), recorder.tensor)


def tensor_store_of_run(
    settings: Settings,
    recorder: Recorder,
    identity: RankIdentity,
    run_folder: Path,
    header: RunHeader,
    *,
    is_late: bool = False,
) -> TensorStore | None:
    """Return what keeps full tensors of a rank in a run: in the trace folder where this host sees
    it, else in the run folder, from where the relay ships them. `is_late`: as `make_tensor_store`.
    """
    collection = Collection.of_run(run_folder, header)
    folder = run_folder if collection.is_elsewhere else header.out
    is_of_all = collection.is_shared and not header.keeps_apart
    return make_tensor_store(
        settings, recorder, folder, identity.stream,
        writers=settings.traced_of(identity.world_size) if is_of_all else identity.local_world_size,
        is_late=is_late,
    )  # fmt: skip
