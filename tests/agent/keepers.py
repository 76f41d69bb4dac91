"""A keeper with a real spool and real chunks, and what it stored as anybody can read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import torch
from safetensors import safe_open

from rankscope.agent.values.tensorstore import LocalChunkStore, TensorStore
from rankscope.capture.describe import Described, Describer
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.record.ranks import StreamId
from rankscope.record.value import STORED_TYPES
from rankscope.spool.chunks.writing import ChunkEntry, ChunkWriter
from rankscope.spool.recordcolumns import StreamReader, records
from rankscope.spool.recordformat import TENSOR, RecordKind
from rankscope.spool.writer import SpoolWriter

__all__ = ["STORED", "STREAM", "Rank", "plainly", "same", "some"]

STREAM = StreamId(rank=0, incarnation=0)
STORED = [getattr(torch, name) for name in STORED_TYPES if hasattr(torch, name)]


class Rank:
    """A keeper with a real spool and real chunks, as a session puts them together."""

    def __init__(
        self, trace: Path, globs: tuple[str, ...] = ("**",), *, spool_bytes: int = 1 << 20,
        budget: int = 1 << 40, memory: int = 1 << 20, **limits: int,
    ) -> None:  # fmt: skip
        self.trace = trace
        self.spool = SpoolWriter(trace / "spool", limit_bytes=spool_bytes)
        self.writer = ChunkWriter(trace, STREAM, limit_bytes=budget, **limits)
        self.told: list[str] = []
        self.describer = Describer(0)
        self.metas: dict[Described, int] = {}
        self.store = LocalChunkStore(self.writer, self._record)
        self.keeper = TensorStore(
            globs, self.store, self._record, memory_bytes=memory, tell=self.told.append
        )

    def _record(self, reference: int, entry: ChunkEntry, described: Described) -> bool:
        number = self.metas.get(described)
        if number is None:
            number = self.metas[described] = len(self.metas) + 1
            meta = described.meta
            self.spool.define(
                msgpack.packb(
                    {"id": number, "kind": "meta", "dtype": meta.dtype, "shape": meta.shape}
                )
            )
        return self.spool.write(
            RecordKind.TENSOR,
            TENSOR.pack(
                reference, entry.chunk, entry.index, entry.begin, entry.nbytes, entry.checksum,
                number,
            ),
        )  # fmt: skip

    def keep(self, tensor: torch.Tensor, *, as_if_on_device: bool = False) -> int:
        with invisible():
            described, local = self.describer.describe(tensor)
            if as_if_on_device:
                described = self._device_twin(described)
            return self.keeper.keep(local, described)

    def _device_twin(self, described: Described) -> Described:
        for known in self.metas:
            if known.meta == described.meta and known.can_digest_on_device:
                return known
        return dataclasses.replace(described, can_digest=False, can_digest_on_device=True)

    @property
    def folder(self) -> Path:
        return self.trace / "tensors" / "rank00000"

    def recorded(self) -> tuple[np.ndarray, dict]:
        """TENSOR records and definitions in the spool."""
        with StreamReader(self.trace / "spool") as reader:
            found = records(b"".join(reader.chunks()))
        return found.columns(RecordKind.TENSOR)[1], {d["id"]: d for d in found.definitions()}

    def close(self) -> dict[int, torch.Tensor]:
        """End as a session does; return everything kept, read with nothing but safetensors."""
        self.keeper.close()
        self.spool.close()
        return dict(plainly(self.folder))


def plainly(folder: Path) -> Iterator[tuple[int, torch.Tensor]]:
    """Everything in all chunks of a folder, with nothing but safetensors."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # a safetensors handle is no mapping
                if key.isdecimal():  # others are bytes that no record accounts for
                    yield int(key), file.get_tensor(key)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, NaN and all."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)
