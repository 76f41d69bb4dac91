"""`rankscope tensor`: full tensors that were kept, one rank's or put together from all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from rankscope.cli.arguments import TraceArgument

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
    from rankscope.cli.tensortext import run_tensor
    from rankscope.tensors.tensornames import Wanted
    from rankscope.tree.selection import parse_mode, parse_phase

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
    run_tensor(
        trace, wanted, rank=rank, is_global=is_global, layout=layout, out=out, is_printed=is_printed
    )
