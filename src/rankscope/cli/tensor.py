"""`rankscope tensor`: full tensors that were kept, one rank's or put together from all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from rankscope.cli.arguments import TraceArgument
from rankscope.cli.printing import echo
from rankscope.cli.tensortext import bytes_text, listing_lines, say
from rankscope.cli.terminal import opened, visible
from rankscope.errors import SettingError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.tensors.ask import asked_tensors, printed, save_tensors
from rankscope.tensors.tensornames import Wanted
from rankscope.tree.selection import parse_mode, parse_phase

__all__ = ["command"]


def command(
    trace: TraceArgument = None,
    names: Annotated[
        Optional[list[str]],  # noqa: UP045  # typer reads it on 3.10
        typer.Argument(
            metavar="[PATH:SLOT]...",
            help="layers.0:output, fc:param:weight, globs; without a slot all slots of that path.",
        ),
    ] = None,
    rank: Annotated[
        Optional[int], typer.Option(min=0, metavar="N", help="The tensors this rank held.")  # noqa: UP045  # typer reads it on 3.10
    ] = None,
    is_global: Annotated[
        bool, typer.Option("--global", help="Global tensors, put together from all ranks.")
    ] = False,
    layout: Annotated[
        Optional[Path],  # noqa: UP045  # typer reads it on 3.10
        typer.Option(metavar="FILE", help="TOML file: how tensors lie that no DTensor describes."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045  # typer reads it on 3.10
        typer.Option(metavar="FILE", help="Write them to this safetensors file, replacing it."),
    ] = None,
    is_printed: Annotated[bool, typer.Option("--print", help="Print them.")] = False,
    step: Annotated[
        Optional[int], typer.Option(min=0, metavar="N", help="Default the first traced.")  # noqa: UP045  # typer reads it on 3.10
    ] = None,
    mode: Annotated[
        str, typer.Option(help="train or eval; default train where there is any.")
    ] = "",
    micro_batch: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of inputs, outputs and their gradients.")
    ] = 0,
    phase: Annotated[
        str,
        typer.Option(
            metavar="PHASE",
            help="Default forward for inputs and outputs, params for param:, grads for grad:.",
        ),
    ] = "",
    ordinal: Annotated[
        Optional[int],  # noqa: UP045  # typer reads it on 3.10
        typer.Option(min=0, metavar="N", help="Which call, of a module called several times."),
    ] = None,
) -> None:
    """Show, print or save the full tensors of a trace (kept with --rs-tensors)."""
    asked = [*(names or ())]
    if trace is not None and not trace.exists() and set(str(trace)) & set(":*?["):
        asked, trace = [str(trace), *asked], None  # a tensor's name: the trace was left out
    wanted = Wanted(
        names=tuple(asked),
        step=step,
        mode=parse_mode(mode) if mode else None,
        micro_batch=micro_batch,
        phase=parse_phase(phase) if phase else None,
        ordinal=ordinal,
    )
    if rank is not None and is_global:
        raise SettingError("--rank and --global: ask for one rank's tensor or for the global one")
    is_handed_out = out is not None or is_printed
    if is_handed_out and not asked:
        raise SettingError("--out and --print need a name: layers.0:output, or '**' for all")
    if (is_global or rank is not None) and not is_handed_out:
        raise SettingError("--rank and --global hand out tensors: add --print or --out FILE")
    layouts = None if layout is None else LayoutFile.load(layout)
    found = opened(trace)
    if not is_handed_out:
        for line in listing_lines(found, wanted):
            echo(line)
        return
    tensors = asked_tensors(found, wanted, say, rank=rank, is_global=is_global, layouts=layouts)
    if is_printed:
        for headline, numbers in printed(tensors):
            echo(f"{visible(headline)}\n{numbers}", is_line=False)
    if out is not None:
        size = save_tensors(out, tensors)
        echo(f"{out}: {len(tensors)} tensors, {bytes_text(size)}", err=is_printed)
