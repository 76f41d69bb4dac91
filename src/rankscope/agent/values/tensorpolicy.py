"""Keeping full tensors in a session: where a rank's chunks go, and how large they may become."""

from __future__ import annotations

from pathlib import Path

from rankscope.agent.guard import say
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.bytestores import LocalChunkStore, Store
from rankscope.agent.values.tensorstore import TensorStore, free_disk_share
from rankscope.chunks.writing import ChunkWriter
from rankscope.record.streams import RankIdentity, StreamId
from rankscope.run.folders import RunHeader
from rankscope.run.prepare import Collection
from rankscope.settings import Settings

__all__ = ["chunk_store", "make_tensor_store", "tensor_store_of_run"]


def make_tensor_store(
    settings: Settings, recorder: Recorder, stream: StreamId, store: Store
) -> TensorStore:
    """Return what keeps the full tensors of one rank, with what it has to say of them."""
    return TensorStore(
        settings.tensors or (),
        store,
        recorder.tensor,
        memory_bytes=settings.tensor_memory,
        tell=lambda text: say(f"rank {stream.rank}: {text}"),
        note=recorder.not_kept,
    )


def chunk_store(
    settings: Settings, recorder: Recorder, folder: Path, stream: StreamId, *, writers: int
) -> Store:
    """Return what puts tensors into chunks.

    Args:
        settings: within what bounds.
        recorder: writes their records.
        folder: takes the chunks: the trace folder, or where that is not seen the run folder.
        stream: whose they are.
        writers: ranks that keep tensors on that disk, for the default budget.
    """
    budget = settings.tensor_budget
    limit_bytes = free_disk_share(folder, writers) if budget is None else budget
    return LocalChunkStore(ChunkWriter(folder, stream, limit_bytes=limit_bytes), recorder.tensor)


def tensor_store_of_run(
    settings: Settings,
    recorder: Recorder,
    identity: RankIdentity,
    run_folder: Path,
    header: RunHeader,
) -> TensorStore:
    """Return what keeps full tensors of a rank in a run: in the trace folder where this host sees
    it, else in the run folder, from where the relay ships them.
    """
    collection = Collection.of_run(run_folder, header)
    folder = run_folder if collection.is_elsewhere else header.out
    is_of_all = collection.is_shared and not header.keeps_apart
    writers = settings.traced_of(identity.world_size) if is_of_all else identity.local_world_size
    store = chunk_store(settings, recorder, folder, identity.stream, writers=writers)
    return make_tensor_store(settings, recorder, identity.stream, store)
