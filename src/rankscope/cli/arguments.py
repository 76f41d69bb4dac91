"""What commands share (docs/commands.md): arguments, options, exit codes."""

from __future__ import annotations

import enum
from math import nan
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rankscope.errors import SettingError
from rankscope.layout.layoutfile import LayoutFile


class ExitCode(enum.IntEnum):
    """How commands end, but `run`, which ends as the job does."""

    FINE = 0
    FINDING = 1
    """The answer is that something is wrong, or not all there."""
    TROUBLE = 2
    """There is no answer."""
    COVERAGE = 3
    """Nothing is wrong, but less was judged than `--require-coverage` asks for."""
    INTERRUPTED = 130


TraceArgument = Annotated[
    Path | None, typer.Argument(help="Trace folder; default this one, or the newest trace here.")
]
LayoutOption = Annotated[
    LayoutFile | None,
    typer.Option(
        parser=lambda name: LayoutFile.load(Path(name)),
        metavar="FILE",
        envvar="RANKSCOPE_LAYOUT",
        help="Declared layouts, for tensors that no DTensor describes.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that is there.")]
CoverageOption = Annotated[
    str,
    typer.Option(
        metavar="PART",
        help="Exit 3 where less than this part of the values was judged (0.9 or 90%).",
    ),
]
SELECTIONS: Final = {
    "path": ("GLOB", "Modules: fnmatch on the whole path, or (root)"),
    "step": ("STEPS", "Steps: 0-2,5 or all"),
    "mode": ("MODE", "train or eval"),
    "phase": ("PHASES", "Phases, separated by commas, or all"),
    "rank": ("RANKS", "Ranks: 0-3,8 or all"),
}


def selection_option(name: str, default: str) -> Any:
    """Return an option that chooses among the values of a trace, read by `tree.selection`."""
    metavar, text = SELECTIONS[name]
    return typer.Option(metavar=metavar, help=f"{text}; default {default}.")


def is_given(context: typer.Context, name: str) -> bool:
    """True for what stands on the command line, also where that is the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def required_coverage_part(text: str) -> float:
    """Return the part that `--require-coverage` asks for, 0.0 to 1.0; else SettingError."""
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
