"""Ask rankscope what it has to say of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope.diagnosis.check import check
from rankscope.diagnosis.comparison.diff import diff
from rankscope.layout.layoutfile import LayoutFile
from rankscope.tree.reader import open_trace
from rankscope.words.reports import report_json


def report_on(
    trace: Path, layout: Path | None, reference: Path | None = None, paths: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the report on a trace, the `result` of `--json` that scripts get: what
    `check` says, or `diff` where there is a reference."""
    layouts = LayoutFile.load(layout) if layout is not None else None
    if reference is not None:
        return report_json(diff(reference, trace, paths=paths, layouts=layouts))
    return report_json(check(open_trace(trace), layouts))
