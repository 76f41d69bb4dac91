"""Arguments and options that several commands take."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Annotated

import typer

from rankscope.layout.layoutfile import LayoutFile

EXIT_COVERAGE = 3
"""Exit code where less was judged than `--require-coverage` asks for."""


def read_layout(name: str) -> LayoutFile:
    """Return the layout file that an option names."""
    return LayoutFile.load(Path(name))


TraceArgument = Annotated[
    Path | None,
    typer.Argument(help="Trace folder; default this one, or the newest rankscope-* here."),
]
LayoutOption = Annotated[
    LayoutFile | None,
    typer.Option(
        parser=read_layout,
        metavar="FILE",
        envvar="RANKSCOPE_LAYOUT",
        help="Declared layouts, for tensors that no DTensor describes.",
    ),
]
CoverageOption = Annotated[
    str,
    typer.Option(
        metavar="PART",
        help="Exit 3 where less than this part of the values was judged (0.9 or 90%).",
    ),
]


def part_of(text: str) -> float:
    """Return the part that `--require-coverage` asks for, 0.0 to 1.0; SettingError: it is none."""
    from rankscope.errors import SettingError

    word = text.strip()
    try:
        part = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        part = nan
    if 0 <= part <= 1:
        return part
    if 1 < part <= 100 and not word.endswith("%"):
        remedy = f"for {word} in a hundred, write {word}% or {part / 100:g}"
    else:
        remedy = "give a part of 1 or a percentage, as in 0.9 or 90%"
    raise SettingError(f"--require-coverage {text}: expected a part from 0 to 1", remedy)
