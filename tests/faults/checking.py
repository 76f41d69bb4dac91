"""Ask rankscope what it has to say of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rankscope


def check(trace: Path, layout: Path | None) -> Mapping[str, Any]:
    """Return the report on a trace, in the format rankscope.report/1."""
    return rankscope.check(trace, layout=layout)
