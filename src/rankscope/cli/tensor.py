"""`rankscope tensor`: full tensors that were kept, one rank's or put together from all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from rankscope.cli.arguments import ForceOption, LayoutOption, TraceArgument, selection_option
from rankscope.cli.terminal import echo, opened, remark, size_text
from rankscope.errors import SelectionError, SettingError
from rankscope.record.ranks import ranks_text
from rankscope.record.texts import counted, visible
from rankscope.tree.selection import default_phase, parse_mode, parse_phase
from rankscope.tree.tensors.ask import Wanted, asked_tensors, choose, printed, save_tensors
from rankscope.tree.tensors.kept import Kept, list_tensors
from rankscope.tree.views import Trace

_MOST_SHAPES = 3
_HEADINGS = ("tensor", "dtype", "shape", "ranks", "values", "bytes")


def command(
    trace: TraceArgument = None,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH:SLOT]...",
            help="layers.0:output, fc:param:weight, globs; without a slot all slots of that path.",
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="The tensors this rank held.")
    ] = None,
    is_global: Annotated[
        bool, typer.Option("--global", help="Global tensors, put together from all ranks.")
    ] = False,
    layout: LayoutOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write them to this new safetensors file.")
    ] = None,
    is_forced: ForceOption = False,
    is_printed: Annotated[bool, typer.Option("--print", help="Print them.")] = False,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Default the first traced.")
    ] = None,
    mode: Annotated[str, selection_option("mode", "train where there is any")] = "",
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
        int | None,
        typer.Option(min=0, metavar="N", help="Which call, of a module called several times."),
    ] = None,
) -> None:
    """Show, print or save the full tensors of a trace (kept with --rs-tensors)."""
    asked = [*(names or ())]
    if trace is not None and not trace.exists() and set(str(trace)) & set(":*?["):
        asked, trace = [str(trace), *asked], None  # a tensor's name: the trace was left out
    selection = Wanted(
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
    read_trace = opened(trace)
    if not is_handed_out:
        for line in _listing_lines(read_trace, selection):
            echo(line)
        return
    tensors = asked_tensors(
        read_trace, selection, remark, rank=rank, is_global=is_global, layouts=layout
    )
    if is_printed:
        for headline, numbers in printed(tensors):
            echo(f"{visible(headline)}\n{numbers}", is_line=False)
    if out is not None:
        size = save_tensors(out, tensors, is_forced=is_forced)
        echo(f"{out}: {len(tensors)} tensors, {size_text(size)}", err=is_printed)


def _listing_lines(trace: Trace, selection: Wanted) -> Iterator[str]:
    """Yield the lines that list what was kept of `wanted`, or all; SelectionError: nothing was."""
    if selection.names:
        chosen, notes = choose(trace, selection)
        for line in notes:
            remark(line)
        views = ((entry.value.node, view) for entry in chosen for view in entry.value.views)
        listing = list_tensors(trace, views)
    else:
        listing = list_tensors(trace)
    if not listing.entries:
        of_these = " of these" if selection.names else ""
        raise SelectionError(
            f"{trace.path}: no full tensors were kept{of_these}; trace again with "
            "rankscope run --rs-tensors 'PATH:SLOT' (or '**' for all), tensors= in code"
        )
    yield from _table([_HEADINGS, *map(_row, listing.entries.values())])
    tensors = f"{counted(listing.values, 'tensor')}, {size_text(listing.nbytes)}"
    yield f"{tensors}; equal ones of a rank are stored once: {size_text(listing.stored)}"


def _row(entry: Kept) -> tuple[str, ...]:
    name = visible(f"{entry.path or '(root)'}:{entry.slot}")
    if entry.phase != default_phase(entry.slot).word:
        name += f" ({entry.phase})"
    shapes = ["x".join(map(str, shape)) or "scalar" for shape in entry.shapes]
    more = f" and {len(shapes) - _MOST_SHAPES} more" if len(shapes) > _MOST_SHAPES else ""
    ranks = ranks_text(entry.ranks) or "none"
    if entry.not_kept:
        ranks += f" (not all of {ranks_text(entry.not_kept)})"
    return (
        name, ",".join(entry.dtypes), ", ".join(shapes[:_MOST_SHAPES]) + more, ranks,
        str(entry.values), size_text(entry.nbytes),
    )  # fmt: skip


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    listed = list(rows)
    widths = [max(len(row[i]) for row in listed) for i in range(len(listed[0]))]
    for row in listed:
        first = [text.ljust(width) for text, width in zip(row[:-2], widths)]
        last = [text.rjust(width) for text, width in zip(row[-2:], widths[-2:])]
        yield "  ".join([*first, *last])
