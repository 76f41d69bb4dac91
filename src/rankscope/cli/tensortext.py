"""The lines of `rankscope tensor`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rankscope.cli.printing import echo
from rankscope.cli.terminal import opened, visible
from rankscope.errors import SelectionError, SettingError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.ranklists import ranks_text
from rankscope.tensors.ask import asked_tensors, printed, save_tensors
from rankscope.tensors.listing import Kept, Listing, list_tensors
from rankscope.tensors.tensornames import Wanted, choose
from rankscope.tree.selection import default_phase
from rankscope.tree.views import Trace

__all__ = ["listing_lines", "run_tensor"]

_MOST_SHAPES = 3
_HEADINGS = ("tensor", "dtype", "shape", "ranks", "values", "bytes")


def run_tensor(
    path: Path | None,
    wanted: Wanted,
    *,
    rank: int | None,
    is_global: bool,
    layout: Path | None,
    out: Path | None,
    is_printed: bool,
) -> None:
    """Do what `rankscope tensor` was asked for.

    Raises:
        SettingError: options that contradict each other.
    """
    if rank is not None and is_global:
        raise SettingError("--rank and --global: ask for one rank's tensor or for the global one")
    is_handed_out = out is not None or is_printed
    if is_handed_out and not wanted.names:
        raise SettingError("--out and --print need a name: layers.0:output, or '**' for all")
    if (is_global or rank is not None) and not is_handed_out:
        raise SettingError("--rank and --global hand out tensors: add --print or --out FILE")
    layouts = None if layout is None else LayoutFile.load(layout)
    trace = opened(path)
    if not is_handed_out:
        for line in listing_lines(trace, wanted):
            echo(line)
        return
    asked = asked_tensors(trace, wanted, _say, rank=rank, is_global=is_global, layouts=layouts)
    if is_printed:
        for headline, numbers in printed(asked):
            echo(f"{visible(headline)}\n{numbers}", is_line=False)
    if out is not None:
        size = save_tensors(out, asked)
        echo(f"{out}: {len(asked)} tensors, {_size(size)}", err=is_printed)


def _say(line: str) -> None:
    echo(visible(f"rankscope: {line}"), err=True)


def listing_lines(trace: Trace, wanted: Wanted) -> Iterator[str]:
    """Yield the lines that list what was kept: all of it, or what the names mean.

    Raises:
        SelectionError: nothing of it was kept; says how to keep tensors.
    """
    if wanted.names:
        chosen, notes = choose(trace, wanted)
        for line in notes:
            _say(line)
        listing = list_tensors(
            trace, ((each.value.node, view) for each in chosen for view in each.value.views)
        )
    else:
        listing = list_tensors(trace)
    if not listing.entries:
        of_these = " of these" if wanted.names else ""
        raise SelectionError(
            f"{trace.path}: no full tensors were kept{of_these}; trace again with "
            "rankscope run --rs-tensors 'PATH:SLOT' (or '**' for all), tensors= in code"
        )
    yield from _table([_HEADINGS, *map(_row, listing.entries.values())])
    yield from _totals(listing)


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
        str(entry.values), _size(entry.nbytes),
    )  # fmt: skip


def _totals(listing: Listing) -> Iterator[str]:
    yield (
        f"{listing.values} tensors, {_size(listing.nbytes)}; equal ones of a rank are stored once: "
        f"{_size(listing.stored)}"
    )


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    listed = list(rows)
    widths = [max(len(row[i]) for row in listed) for i in range(len(listed[0]))]
    for row in listed:
        first = [text.ljust(width) for text, width in zip(row[:-2], widths)]
        last = [text.rjust(width) for text, width in zip(row[-2:], widths[-2:])]
        yield "  ".join([*first, *last])


def _size(count: int) -> str:
    """Return bytes as people read them."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
        size /= 1000
    raise AssertionError
