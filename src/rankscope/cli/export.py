"""`rankscope export`: a trace in the format of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import (
    ForceOption,
    LayoutOption,
    TraceArgument,
    is_given,
    selection_option,
)
from rankscope.cli.terminal import echo, opened, remark, say_unread
from rankscope.errors import SettingError
from rankscope.export.formats import Selection, export, format_named
from rankscope.run.messages import progress


def command(
    context: typer.Context,
    format_name: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="jsonl, perfetto, parquet or hf.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="PATH", help="New file, for parquet and hf new folder.")
    ],
    trace: TraceArgument = None,
    is_forced: ForceOption = False,
    path: Annotated[str, selection_option("path", "all")] = "*",
    step: Annotated[str, selection_option("step", "all")] = "",
    mode: Annotated[str, selection_option("mode", "both")] = "",
    phase: Annotated[str, selection_option("phase", "all")] = "",
    rank: Annotated[str, selection_option("rank", "all")] = "",
    is_global: Annotated[
        bool, typer.Option("--global", help="hf: global tensors, put together from all ranks.")
    ] = False,
    layout: LayoutOption = None,
    all_layers: Annotated[
        bool, typer.Option("--all-layers", help="hf: every layer, not the first and last of each.")
    ] = False,
    all_outputs: Annotated[
        bool, typer.Option("--all-outputs", help="hf: outputs of modules that hold others too.")
    ] = False,
    safetensors: Annotated[
        bool, typer.Option("--safetensors", help="hf: a file for each tensor, not its text.")
    ] = False,
) -> None:
    """Write a trace in the format of another tool; PATH appears when it is whole."""
    format_named(format_name)
    selection = Selection.parse(path=path, step=step, mode=mode, phase=phase, rank=rank)
    options: dict[str, object] = {
        "is_global": is_global, "layout": layout if is_global else None,
        "all_layers": all_layers, "all_outputs": all_outputs, "safetensors": safetensors,
    }  # fmt: skip
    if is_global and rank:
        raise SettingError("--global and --rank: take one, global tensors are of all ranks")
    if is_given(context, "layout") and not is_global:
        raise SettingError("--layout: says how global tensors are put together; give --global")
    read_trace = opened(trace)
    if not read_trace.is_complete:
        remark(f"{read_trace.path} is incomplete: see rankscope verify {read_trace.path}")
    with progress() as say:
        first, *more = export(
            read_trace, format_name, out, selection, say, options, is_forced=is_forced
        )
    echo(f"{out}: {first}")
    for line in more:
        remark(line)
    say_unread(read_trace)
