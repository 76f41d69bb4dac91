"""How long ranks of a job that lives may stand in a collective before that counts as a hang."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rankscope.judge.issues import Issue, issues_of
from rankscope.judge.observed import Moment
from rankscope.judge.scene import Scene
from rankscope.tree.ranks import ranks_named

__all__ = ["Patience"]

_FEWEST_S: Final = 3.0
_TIMES_LONGEST: Final = 3.0
_MOST_TOLD: Final = 4


class Patience:
    """Three times as long as any rank stood in one in the last steps, and 3 s at least."""

    def __init__(self, moments: Sequence[Moment], scene: Scene) -> None:
        """Look at the last steps. `moments`: these."""
        longest_ns = 0
        for moment in moments:
            for issue in issues_of(moment):
                begins, ends = scene.clock.span(issue.call, issue.ranks)
                longest_ns = max(longest_ns, int((ends - begins).max()))
        self.seconds = max(_FEWEST_S, _TIMES_LONGEST * longest_ns / 1e9)
        self._now_s = time.time()

    def is_over(self, since_ns: int) -> bool:
        """True for a rank that has stood there for longer."""
        return self._now_s - since_ns / 1e9 >= self.seconds

    def told(self, standing: Mapping[int, tuple[Issue, int]]) -> Iterator[str]:
        """Yield a line for each collective in which ranks stand for longer than any did before, but
        not for long enough.

        Args:
            standing: rank -> the collective, and since when.
        """
        alike: dict[tuple[str, str], list[int]] = {}
        for rank, (issue, _) in sorted(standing.items()):
            alike.setdefault((issue.op, issue.call.path or "(root)"), []).append(rank)
        for (op, path), ranks in [*alike.items()][:_MOST_TOLD]:
            stood_s = self._now_s - min(standing[rank][1] for rank in ranks) / 1e9
            if stood_s < self.seconds / _TIMES_LONGEST:
                continue
            yield (
                f"{ranks_named(ranks)} {'has' if len(ranks) == 1 else 'have'} been in {op} of "
                f"{path} for {stood_s:.1f} s; in this job that is a "
                f"hang after {self.seconds:.1f} s: ask again"
            )
