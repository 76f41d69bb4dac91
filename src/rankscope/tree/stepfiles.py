"""Files of one trace: nodes of a step, where they are not in trace.json, and values.

A name from a file is taken only where it is one that a trace has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.errors import TraceError
from rankscope.run.filenames import NODES_FORMAT, STEPS_FOLDER, VALUES_NAME
from rankscope.run.replacing import replacing
from rankscope.tree.tracejson import load_json

__all__ = ["listed_nodes", "nodes_path", "read_nodes", "values_path", "write_nodes"]

_NODES = re.compile(rf"{STEPS_FOLDER}/\d{{6,}}\.json")
_VALUES = re.compile(rf"{re.escape(VALUES_NAME)}|{STEPS_FOLDER}/\d{{6,}}\.safetensors")


def write_nodes(
    folder: Path,
    number: int,
    head: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    *,
    is_synced: bool = True,
) -> dict[str, Any]:
    """Write the nodes of a step; return its head with the name of the file.

    It is written on one line, unlike trace.json: there are many, and they are read by programs.

    Args:
        folder: the trace folder, with its `steps`.
        number: of the file.
        head: what identifies the step.
        nodes: its top nodes, as `Document.nodes` makes them.
        is_synced: see that it is on disk.

    Raises:
        OSError: it cannot be written.
    """
    name = f"{STEPS_FOLDER}/{number:06d}.json"
    data = {"format": NODES_FORMAT, **head, "nodes": nodes}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, check_circular=False)
    with replacing(folder / name, is_synced=is_synced) as file:
        file.write(text.encode())
        file.write(b"\n")
    return {**head, "nodes_file": name}


def nodes_path(folder: Path, head: Mapping[str, Any]) -> Path:
    """Return the file of the nodes of a step whose head names it.

    Raises:
        TraceError: the file named is none that a trace has.
    """
    return _named(folder, str(head["nodes_file"]), _NODES, "nodes")


def values_path(folder: Path, part: Mapping[str, Any]) -> Path:
    """Return the values file of a trace, or of a part of it that names the file.

    Raises:
        TraceError: the file named is none that a trace has.
    """
    return _named(folder, str(part["file"]), _VALUES, "values")


def _named(folder: Path, name: str, pattern: re.Pattern[str], what: str) -> Path:
    if not pattern.fullmatch(name):
        raise TraceError(f"{folder}: {name!r} is no {what} file: the trace is damaged")
    return folder / name


def read_nodes(file: Path) -> list[dict[str, Any]]:
    """Return the nodes in a nodes file.

    Raises:
        TraceError: it cannot be read, or is damaged.
        TraceVersionError: it is of a newer format.
    """
    return listed_nodes(load_json(file, "nodes"), file)


def listed_nodes(holder: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Return the nodes of a step in trace.json, or of a nodes file.

    Raises:
        TraceError: there is no list of them.
    """
    nodes = holder.get("nodes")
    if not isinstance(nodes, list):
        raise TraceError(f"{file}: has no list of nodes: the trace is damaged")
    return nodes
