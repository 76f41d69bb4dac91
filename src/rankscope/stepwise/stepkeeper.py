"""Writes finished steps of a running job into its tree, and frees their records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.errors import RankscopeError
from rankscope.run.companions import GROWS_FROM_BYTES
from rankscope.spool.replication import replicated
from rankscope.stepwise.finishedsteps import RunningJob
from rankscope.stepwise.stepsplit import StepKey
from rankscope.tree.finishedtrace import trace_of
from rankscope.tree.growingtree import GrowingTree
from rankscope.tree.step import StepName
from rankscope.tree.views import Trace

__all__ = ["KeepSizes", "StepKeeper"]


_PART_BYTES: Final = 32 << 20
"""Of records that are assembled at a time, where that is more than one step."""
_MOST_BYTES: Final = 128 << 20
"""Of records of one step: to assemble it takes a dozen times as much memory."""
_WAIT_S: Final = 10.0
"""Steps wait for others until they are worth a part, but not longer."""
_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSizes:
    """Bytes of records."""

    begin: int = GROWS_FROM_BYTES
    """Of the whole job, before the tree grows."""
    part: int = 8 << 20
    """That are worth a part; 0 for any."""
    free: int = 16 << 20
    """That are freed at a time."""


class StepKeeper:
    """One job, whose tree grows once its records are many."""

    def __init__(
        self,
        out: Path,
        *,
        traced_ranks: int,
        say: Callable[[str], object],
        sizes: KeepSizes = KeepSizes(),
        dataset: Callable[[Trace], None] | None = None,
    ) -> None:
        """Write nothing yet.

        Args:
            out: the trace folder.
            traced_ranks: how many ranks write a stream.
            say: takes a line about what cannot be done.
            sizes: when it is worth what.
            dataset: takes the trace of each part before it is in the tree: what is in the tree was
                taken. After a kill it may be given steps again.
        """
        self._out, self._say, self._sizes = out, say, sizes
        self._dataset = dataset
        self._job = RunningJob(out, traced_ranks=traced_ranks)
        self._tree: GrowingTree | None = None
        self.is_behind = False
        """So much came since the last look that there should be less time between them."""
        self._written_at = time.monotonic()
        self._took_s = 0.0
        self._unsettled = 0
        self._is_off = False
        self._retry_at = 0.0

    def look(self, is_stopped: Callable[[], bool]) -> bool:
        """Read what is new, write what is worth it, free it; True where more waits."""
        if self._is_off or time.monotonic() < self._retry_at:
            return False
        try:
            return self._look(is_stopped)
        except OSError as error:
            self._say(
                f"steps are not written while the job runs: {error.strerror}; tried again; their "
                "records are kept"
            )
            self._retry_at = time.monotonic() + _RETRY_S
        except RankscopeError as error:
            self._say(
                f"steps are not written any more while the job runs: {error}; their records are "
                "kept until its end"
            )
            self.close()
        return False

    def close(self) -> None:
        """Write nothing more."""
        self._is_off, self.is_behind = True, False
        self._job.drop(self._job.held())
        if self._tree is not None:
            self._tree.close()

    def _look(self, is_stopped: Callable[[], bool]) -> bool:
        tree = self._begun()
        if tree is None:
            return False
        taken = self._job.read(is_stopped)
        self.is_behind = taken >= self._sizes.free
        if self._job.keeps_tensors:
            self.close()  # which records name a tensor is known at the end
            return False
        largest = max(map(self._job.bytes_of, self._job.held()), default=0)
        if largest > _MOST_BYTES:
            self._say(
                f"steps are not written while the job runs: one takes {largest >> 20} MB of "
                f"records, more than {_MOST_BYTES >> 20}; their records are kept until its end"
            )
            self.close()
            return False
        for part in self._parts(self._due(self._unwritten(tree))):
            if is_stopped():
                return False
            self._write(tree, part)
        again = self._job.kept_bytes + self._job.held_bytes  # written anew each time
        if self._unsettled >= max(self._sizes.free, 2 * again):
            tree.sync()
            self._job.settle()
            self._unsettled = 0
        return taken > 0

    def _unwritten(self, tree: GrowingTree) -> list[StepKey]:
        """Return the steps that can be written; let those go that a process before this one
        wrote."""
        past, life = self._job.past(), self._job.life
        written = {k for k in past if StepName(life, k.mode, k.step) in tree.written}
        self._unsettled += sum(map(self._job.bytes_of, written))
        self._job.drop(written)
        return [k for k in past if k not in written and not self._job.has_tensors(k)]

    def _due(self, keys: list[StepKey]) -> list[StepKey]:
        """Return the steps where they are worth a part, or have waited long, and none elsewhere.

        Setup is read again for each part, so a part should be larger.
        """
        worth = max(self._sizes.part, self._job.kept_bytes) if self._sizes.part else 0
        # longer where it took long to write the last one
        has_waited = time.monotonic() - self._written_at > _WAIT_S * max(1.0, self._took_s)
        return keys if has_waited or sum(map(self._job.bytes_of, keys)) >= worth else []

    def _begun(self) -> GrowingTree | None:
        """Return the tree once it grows, None before."""
        if self._tree is None:
            if sum(replicated(self._out).values()) < self._sizes.begin:
                return None
            self._tree = GrowingTree.to_write(self._out)
        return self._tree

    def _parts(self, keys: Sequence[StepKey]) -> list[list[StepKey]]:
        """Return steps by the parts that they are written in."""
        parts: list[list[StepKey]] = []
        size = _PART_BYTES
        for key in keys:
            if size >= _PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(key)
            size += self._job.bytes_of(key)
        return parts

    def _write(self, tree: GrowingTree, keys: Sequence[StepKey]) -> None:
        began = time.monotonic()
        self._unsettled += sum(map(self._job.bytes_of, keys))
        document = self._job.document(keys, tree.began_ns)
        if self._dataset is not None:
            self._dataset(trace_of(document, self._out, is_live=True))
        tree.add(document)
        self._job.drop(keys)
        self._written_at = time.monotonic()
        self._took_s = self._written_at - began
