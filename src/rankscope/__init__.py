"""One trace for a whole distributed training job: which module, on which rank, went wrong first,
and how.

Importing this package imports neither torch nor numpy, nor what traces and reads: all that is
loaded when it is used. The calls a training script makes are here at once, because a process that
may open no more files could not load even what tells it so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rankscope.tracing import attach, open_trace, step, trace

if TYPE_CHECKING:
    from rankscope import report
    from rankscope.diagnosis.check import check
    from rankscope.diagnosis.comparison.diff import diff
    from rankscope.replaying import replay
    from rankscope.tree.views import Trace

__all__ = ["Trace", "attach", "check", "diff", "open_trace", "replay", "report", "step", "trace"]
__version__ = "0.1.0"

_HOMES = {
    "Trace": "rankscope.tree.views",
    "check": "rankscope.diagnosis.check",
    "diff": "rankscope.diagnosis.comparison.diff",
    "replay": "rankscope.replaying",
}


def __getattr__(name: str) -> object:
    if name == "report":
        return importlib.import_module("rankscope.report")
    if name not in _HOMES:
        raise AttributeError(f"module 'rankscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
