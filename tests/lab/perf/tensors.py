"""Streamed writing of full tensors, against the bar: 1,500 MB/s at 64 KiB tensors.

    python -m tests.lab.perf.tensors [MB] [KiB per tensor] [folder]

Side by side and taking turns in one run: the keeper (description, checksum and record included),
the chunk writer alone, safetensors' `save_file` of the same tensors in one file, and one file per
tensor. A plain write of the same bytes says what the disk gives. Best and median of several rounds:
on a machine shared with others look at the best, and at what a second of CPU does.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file

from rankscope.agent.recorder import Recorder
from rankscope.agent.values.tensorstore import LocalChunkStore, TensorStore
from rankscope.capture.describe import Described, Describer
from rankscope.capture.keeping import own_bytes
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.ranks import StreamId
from rankscope.spool.chunks.writing import ChunkEntry, ChunkWriter
from rankscope.spool.recordformat import TENSOR, RecordKind
from rankscope.spool.writer import SpoolWriter
from tests.lab.perf import keptsteps

BAR_MB_S = 1500
ROUNDS = 7
STREAM = StreamId(rank=0, incarnation=0)
Way = Callable[[Path, list[torch.Tensor]], None]


def plain_write(folder: Path, tensors: list[torch.Tensor]) -> None:
    """What the disk gives: the bytes behind each other, nothing else."""
    with (folder / "plain").open("wb", buffering=0) as file:
        for tensor in tensors:
            file.write(own_bytes(tensor).data)  # type: ignore[union-attr]  # all contiguous


def chunks(folder: Path, tensors: list[torch.Tensor]) -> None:
    """The chunk writer with its checksums, without records."""
    writer = ChunkWriter(folder, STREAM, limit_bytes=1 << 40)
    for reference, tensor in enumerate(tensors, 1):
        data = own_bytes(tensor)
        assert data is not None
        checksum = xxhash.xxh3_64_intdigest(data)
        entry = writer.write(reference, "float32", tensor.shape, (data,), checksum=checksum)
        assert entry is not None
        writer.commit(entry)
    writer.finish()


def keeper(folder: Path, tensors: list[torch.Tensor]) -> None:
    """All that a hook does to keep a value."""
    spool = SpoolWriter(folder / "spool", limit_bytes=64 << 20)
    recorder = Recorder(spool)
    writer = ChunkWriter(folder, STREAM, limit_bytes=1 << 40)

    def record(reference: int, entry: ChunkEntry, described: Described) -> bool:
        return spool.write(
            RecordKind.TENSOR,
            TENSOR.pack(
                reference, entry.chunk, entry.index, entry.begin, entry.nbytes, entry.checksum,
                recorder.meta(described),
            ),
        )  # fmt: skip

    store = LocalChunkStore(writer, record)
    keeping = TensorStore(("**",), store, record, memory_bytes=1 << 20, tell=print)
    describer = Describer(0)
    for tensor in tensors:
        with invisible():
            described, local = describer.describe(tensor)
            if keeping.wants("layers.0.attention", "output"):
                assert keeping.keep(local, described)
    keeping.close()
    spool.close()


def one_save_file(folder: Path, tensors: list[torch.Tensor]) -> None:
    """safetensors' own writer, everything in one call."""
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    save_file(named, folder / "all.safetensors")


def file_per_tensor(folder: Path, tensors: list[torch.Tensor]) -> None:
    """One save_file a tensor."""
    for number, tensor in enumerate(tensors):
        save_file({"value": tensor}, folder / f"{number}.safetensors")


WAYS: tuple[Way, ...] = (plain_write, chunks, keeper, one_save_file, file_per_tensor)


def main() -> None:
    """Print MB/s of each way."""
    if "--step" in sys.argv:
        keptsteps.main([argument for argument in sys.argv[1:] if argument != "--step"])
        return
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    size = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    base = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(tempfile.gettempdir())
    torch.set_num_threads(1)
    tensors = [torch.randn(size * 256) for _ in range(total * 1024 // size)]
    written = sum(tensor.nbytes for tensor in tensors) / 1e6
    rates: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
    cpu: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            folder = Path(tempfile.mkdtemp(dir=base))
            try:
                began, worked = time.perf_counter(), time.process_time()
                way(folder, tensors)
                rates[way.__name__].append(written / (time.perf_counter() - began))
                cpu[way.__name__].append(written / (time.process_time() - worked))
            finally:
                shutil.rmtree(folder)
    print(f"{len(tensors)} tensors of {size} KiB, {written:.0f} MB, {ROUNDS} rounds in {base}")
    saved = max(rates["one_save_file"])
    for name, found in rates.items():
        best, median = max(found), statistics.median(found)
        print(
            f"{name:16} {best:7.0f} MB/s best, {median:7.0f} median, "
            f"{best / saved:5.2f}x save_file, "
            f"{max(cpu[name]):7.0f} MB per second of CPU"
        )
    best = max(rates["keeper"])
    print(f"keeper against the bar of {BAR_MB_S} MB/s: {best / BAR_MB_S:.2f}x")


if __name__ == "__main__":
    main()
