"""The lines of `rankscope tensor`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankscope.cli.printing import echo
from rankscope.cli.terminal import visible
from rankscope.errors import SelectionError
from rankscope.record.ranklists import ranks_text
from rankscope.tensors.listing import Kept, list_tensors
from rankscope.tensors.tensornames import Wanted, choose
from rankscope.tree.selection import default_phase
from rankscope.tree.views import Trace

__all__ = ["bytes_text", "listing_lines", "say"]

_MOST_SHAPES = 3
_HEADINGS = ("tensor", "dtype", "shape", "ranks", "values", "bytes")


def say(line: str) -> None:
    """Say on stderr what must be known of the tensors that are handed out."""
    echo(visible(f"rankscope: {line}"), err=True)


def listing_lines(trace: Trace, wanted: Wanted) -> Iterator[str]:
    """Yield the lines that list what was kept: all of it, or what the names mean.

    Raises:
        SelectionError: nothing of it was kept; says how to keep tensors.
    """
    if wanted.names:
        chosen, notes = choose(trace, wanted)
        for line in notes:
            say(line)
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
    held, stored = bytes_text(listing.nbytes), bytes_text(listing.stored)
    yield f"{listing.values} tensors, {held}; equal ones of a rank are stored once: {stored}"


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
        str(entry.values), bytes_text(entry.nbytes),
    )  # fmt: skip


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    listed = list(rows)
    widths = [max(len(row[i]) for row in listed) for i in range(len(listed[0]))]
    for row in listed:
        first = [text.ljust(width) for text, width in zip(row[:-2], widths)]
        last = [text.rjust(width) for text, width in zip(row[-2:], widths[-2:])]
        yield "  ".join([*first, *last])


def bytes_text(count: int) -> str:
    """Return bytes as people read them."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"
        size /= 1000
    raise AssertionError
