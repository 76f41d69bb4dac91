"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

__all__ = ["LayoutOption", "TraceArgument"]

TraceArgument = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads it on 3.10
    typer.Argument(help="Trace folder; default this one, or the newest rankscope-* here."),
]
LayoutOption = Annotated[
    Optional[Path],  # noqa: UP045  # as above
    typer.Option(
        metavar="FILE",
        envvar="RANKSCOPE_LAYOUT",
        help="Declared layouts, for tensors that no DTensor describes.",
    ),
]
