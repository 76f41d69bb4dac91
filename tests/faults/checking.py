"""Ask rankscope what it has to say of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankscope.diagnosis.check import check
from rankscope.diagnosis.report import report_json
from rankscope.layout.layoutfile import LayoutFile
from rankscope.tree.reader import open_trace


def report_on(trace: Path, layout: Path | None) -> dict[str, Any]:
    """Return the report on a trace, in the format rankscope.report/1, as scripts get it."""
    layouts = LayoutFile.load(layout) if layout is not None else None
    return report_json(check(open_trace(trace), layouts))
