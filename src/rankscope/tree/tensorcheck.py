"""Are the kept tensors of a trace what their ranks wrote?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rankscope.errors import ChunkError
from rankscope.spool.chunkfinish import damaged
from rankscope.spool.chunkheader import TENSOR_FOLDER, chunk_numbers, chunk_path, stream_of_folder

__all__ = ["tensor_faults"]


def tensor_faults(trace: Path) -> Iterator[str]:
    """Read every chunk of a trace folder; yield a line for each that is not as it was written."""
    kept = trace / TENSOR_FOLDER
    if not kept.is_dir():
        return
    for folder in sorted(kept.iterdir()):
        if stream_of_folder(folder) is None:
            continue
        for number in chunk_numbers(folder):
            name = chunk_path(folder.relative_to(trace), number)
            try:
                lost = len(damaged(trace / name))
            except ChunkError as error:
                yield str(error)
                continue
            if lost:
                are = "tensor is" if lost == 1 else "tensors are"
                yield f"{name}: {lost} {are} not what the rank wrote: the file was damaged"
