"""JSON files that name their format: which of them this rankscope reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import rankscope
from rankscope.errors import TraceError, TraceVersionError
from rankscope.tree.schemacheck import check_json

_FORMAT = re.compile(r"rankscope\.(trace|nodes)/([0-9]{1,9})")
_NEWEST = {"trace": 3, "nodes": 1}


def load_json(path: Path, kind: str) -> dict[str, Any]:
    """Read a file of a trace; `kind`: trace or nodes. TraceError: it cannot be read, or is none of
    that kind; TraceVersionError: it is of a newer format."""
    try:
        data = json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is no JSON ({error}); the trace is damaged") from error
    found = _FORMAT.fullmatch(str(data.get("format"))) if isinstance(data, dict) else None
    if found is None or found[1] != kind:
        raise TraceError(
            f"{path}: no rankscope {kind}, or a damaged one: it names no rankscope.{kind} format"
        )
    if int(found[2]) > _NEWEST[kind]:
        run = data.get("run")
        versions = run.get("versions") if isinstance(run, dict) else None
        maker = versions.get("rankscope") if isinstance(versions, dict) else None
        needed = f"rankscope {maker} or newer" if maker else "a newer rankscope"
        if maker == rankscope.__version__:  # between two releases
            needed = f"the rankscope {maker} that wrote it, a newer build than this one"
        raise TraceVersionError(
            f"{path}: format {found[0]}, this rankscope reads up to "
            f"rankscope.{kind}/{_NEWEST[kind]}; install {needed}"
        )
    is_older = kind == "trace" and int(found[2]) < _NEWEST[kind]
    check_json(data, f"older_{kind}" if is_older else kind, path)
    checked: dict[str, Any] = data
    return checked


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
