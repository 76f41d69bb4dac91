"""Lists of ranks as people write them: "0-3,8" and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rankscope.errors import TraceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["RankTexts", "parse_ranks", "ranks_named", "ranks_text"]


class RankTexts:
    """`ranks_text` for columns of ranks, where the same few sets come again and again."""

    def __init__(self) -> None:
        self._texts: dict[bytes, str] = {}

    def text(self, ranks: NDArray[np.int64]) -> str:
        """Return the ranks of a column, folded."""
        key = ranks.tobytes()
        found = self._texts.get(key)
        if found is None:
            found = self._texts[key] = ranks_text(ranks.tolist())
        return found


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
    """Return `rank 3` for one, `ranks 0-2,8` for several; a text is taken as `ranks_text` made
    it."""
    text = ranks if isinstance(ranks, str) else ranks_text(ranks)
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that `ranks_text` wrote, sorted.

    Raises:
        TraceError: the text is no list of ranks.
    """
    if text.isdecimal():  # one rank: what small traces ask for thousands of times
        return (int(text),)
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise TraceError(f"{text!r} is no list of ranks: expected one like 0-3,8")
        ranks.extend(range(int(first), int(last or first) + 1))
    return tuple(ranks)
