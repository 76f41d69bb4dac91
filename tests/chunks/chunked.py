"""Tensors the chunk tests write: their bytes tell their reference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import safe_open

from rankscope.record.ranks import StreamId
from rankscope.record.value import STORED_TYPES
from rankscope.spool.chunks.writing import ChunkEntry, ChunkWriter
from rankscope.spool.recordformat import TENSOR, TENSOR_DTYPE

STREAM = StreamId(rank=3, incarnation=0)


def content(reference: int, nbytes: int) -> np.ndarray:
    """Bytes that no other reference has, the same in every process."""
    seed = int.from_bytes(hashlib.blake2b(str(reference).encode(), digest_size=8).digest(), "big")
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def pack(entry: ChunkEntry, meta: int) -> bytes:
    """The TENSOR record of an entry."""
    return TENSOR.pack(
        entry.reference, entry.chunk, entry.index, entry.begin, entry.nbytes, entry.checksum, meta
    )


class Writing:
    """A chunk writer, and the records its entries would leave in a spool."""

    def __init__(self, trace: Path, stream: StreamId = STREAM, **limits: int) -> None:
        self.trace = trace
        self.writer = ChunkWriter(trace, stream, **{"limit_bytes": 1 << 40, **limits})
        self.records: list[bytes] = []
        self.definitions: dict[int, dict[str, Any]] = {}
        self.shapes: dict[int, tuple[str, tuple[int, ...]]] = {}

    def add(self, reference: int, dtype: str = "uint8", shape: tuple[int, ...] = (7,)) -> bool:
        """Store one tensor; False where the writer is over."""
        data = content(reference, int(np.prod(shape)) * STORED_TYPES[dtype].item_bytes)
        entry = self.writer.write(reference, dtype, shape, (data,))
        if entry is None:
            return False
        assert entry.checksum == xxhash.xxh3_64_intdigest(data)
        self.writer.commit(entry)
        self.definitions[reference] = {"dtype": dtype, "shape": list(shape)}
        self.shapes[reference] = dtype, shape
        self.records.append(pack(entry, reference))
        return True

    @property
    def tensors(self) -> np.ndarray:
        """TENSOR_DTYPE of all records."""
        return np.frombuffer(b"".join(self.records), TENSOR_DTYPE)


def read_plainly(folder: Path) -> Mapping[int, np.ndarray]:
    """Everything in all chunks of a folder, with nothing but safetensors."""
    found: dict[int, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118  # a safetensors handle is no mapping
                if key.isdigit():
                    found[int(key)] = file.get_tensor(key)
    return found


def assert_whole(found: Mapping[int, np.ndarray], reference: int) -> None:
    """Assert that a tensor is there with the bytes that were written."""
    array = found[reference]
    assert array.tobytes() == content(reference, array.nbytes).tobytes()
