"""Lists of ranks as people write them: "0-3,8" and back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rankscope.errors import TraceError
from rankscope.record.streams import MAX_RANKS

_PART: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_SHORT: Final = 6
"""Characters below which a number costs nothing to make."""
_SHOWN: Final = 60


def ranks_text(ranks: Iterable[int]) -> str:
    """Return sorted distinct ranks with runs folded: {0, 1, 2, 8} -> "0-2,8"; "" for none."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_named(ranks: Iterable[int] | str) -> str:
    """Return `rank 3` for one, `ranks 0-2,8` for several; a text is as `ranks_text` made it."""
    text = ranks if isinstance(ranks, str) else ranks_text(ranks)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def others_text(ranks: Iterable[int], world_size: int) -> str:
    """Return the ranks of a world that are not among some, folded, however large the world."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for rank in sorted({*ranks, world_size}):
        if begin < rank <= world_size:
            runs.append((begin, rank - 1))
        begin = rank + 1
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_ranks(text: str, world_size: int = MAX_RANKS) -> tuple[int, ...]:
    """Return the ranks that `ranks_text` wrote, sorted.

    Raises:
        TraceError: the text is no list of ranks of this world.
    """
    if len(text) < _SHORT and text.isascii() and text.isdecimal() and int(text) < world_size:
        return (int(text),)  # one rank: what small traces ask for thousands of times
    ranks: list[int] = []
    behind = 0
    for part in filter(None, text.split(",")):
        found = _PART.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not behind <= first <= last < world_size:
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            raise TraceError(
                f"{shown!r} is no list of ranks in a world of {world_size}: expected one like 0-3,8"
            )
        ranks.extend(range(first, last + 1))
        behind = last + 1
    return tuple(ranks)
