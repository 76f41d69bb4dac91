"""Step files in which something else stands than this rankscope writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from rankscope.run.folders import STEPS_FORMAT
from rankscope.spool.chunks.safetensors import write_arrays

Columns = dict[str, NDArray[Any]]

__all__ = ["Columns", "alter_step"]


def alter_step(trace: Path, alter: Callable[[Columns, list[str]], None]) -> None:
    """Alter the first step of a finished trace: its file is written anew, with a right checksum.

    Args:
        trace: the folder.
        alter: changes the columns of the step in place, and the texts of the file: those that it
            adds come behind the others.
    """
    entry = json.loads((trace / "trace.json").read_text())["steps"][0]
    columns = {name: column.copy() for name, column in load_file(trace / entry["file"]).items()}
    utf8, ends = columns["utf8.byte"].tobytes(), columns["texts.end"].tolist()
    texts = [utf8[begin:end].decode() for begin, end in zip([0, *ends], ends)]
    tables = {name: name.partition(".")[0] for name in columns}
    rows = {table: slice(*place) for table, place in entry["rows"].items()}
    alter({n: columns[n][rows[table]] for n, table in tables.items() if table in rows}, texts)
    data = [text.encode() for text in texts]
    columns["texts.end"] = np.cumsum([len(each) for each in data], dtype=np.int64)
    columns["utf8.byte"] = np.frombuffer(b"".join(data), np.uint8)
    made = {name: lambda column=column: column for name, column in columns.items()}
    write_arrays(trace / entry["file"], made, {"format": STEPS_FORMAT})
