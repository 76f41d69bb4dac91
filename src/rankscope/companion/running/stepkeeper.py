"""Writes finished steps of a running job into its tree, and frees their records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.companion.running.runningjob import RunningJob
from rankscope.companion.running.splitstream import StepKey
from rankscope.errors import RankscopeError
from rankscope.run.processes import GROWS_FROM_BYTES
from rankscope.tree.growingtree import GrowingTree, trace_of
from rankscope.tree.step import StepName
from rankscope.tree.views import Trace

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


class StepKeeper:
    """One job, whose tree grows once its records are many."""

    def __init__(
        self,
        job: RunningJob,
        out: Path,
        *,
        say: Callable[[str], object],
        sizes: KeepSizes = KeepSizes(),
        dataset: Callable[[Trace], None] | None = None,
    ) -> None:
        """Write nothing yet; `say` takes lines about trouble. `dataset` takes the trace of each
        part before it is in the tree, so it has what is in the tree; after a kill it may get steps
        again."""
        self._job, self._out, self._say = job, out, say
        self._sizes, self._dataset = sizes, dataset
        self._tree: GrowingTree | None = None
        self._written_at = time.monotonic()
        self._took_s = 0.0
        self._is_off = False
        self._retry_at = 0.0

    def look(self, is_stopped: Callable[[], bool]) -> None:
        """Write what is worth it, free it."""
        if self._is_off or time.monotonic() < self._retry_at:
            return
        try:
            self._look(is_stopped)
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

    def needs(self, key: StepKey) -> bool:
        """True for a held step that is to be written."""
        tree = None if self._is_off else self._tree
        return tree is not None and StepName(self._job.life, key.mode, key.step) not in tree.written

    @property
    def is_behind(self) -> bool:
        """So much came with the last look that there should be less time between them."""
        is_growing = self._tree is not None and not self._is_off
        return is_growing and self._job.taken_bytes >= self._sizes.free

    def close(self) -> None:
        """Write nothing more."""
        self._is_off = True
        if self._tree is not None:
            self._tree.close()

    def _look(self, is_stopped: Callable[[], bool]) -> None:
        job = self._job
        if self._tree is None:
            if sum(job.lengths.values()) >= self._sizes.begin:
                self._tree = GrowingTree.to_write(self._out)
                if self._tree is not None:
                    job.read_again()
            return
        if job.keeps_tensors:
            self.close()  # which records name a tensor is known at the end
            return
        largest = max(map(job.bytes_of, job.held()), default=0)
        if largest > _MOST_BYTES:
            self._say(
                f"steps are not written while the job runs: one takes {largest >> 20} MB of "
                f"records, more than {_MOST_BYTES >> 20}; their records are kept until its end"
            )
            self.close()
            return
        due = [key for key in job.past() if self.needs(key) and not job.has_tensors(key)]
        for part in self._parts(self._due(due)):
            if is_stopped():
                return
            self._write(self._tree, part)
        job.let_go()
        rewritten = job.kept_bytes + job.held_bytes  # rewritten each time
        if job.settled_bytes >= max(self._sizes.free, 2 * rewritten):
            self._tree.sync()
            job.settle()

    def _due(self, keys: list[StepKey]) -> list[StepKey]:
        """Return the steps, or none yet: setup is read again for each part."""
        worth = max(self._sizes.part, self._job.kept_bytes) if self._sizes.part else 0
        # longer where it took long to write the last one
        has_waited = time.monotonic() - self._written_at > _WAIT_S * max(1.0, self._took_s)
        return keys if has_waited or sum(map(self._job.bytes_of, keys)) >= worth else []

    def _parts(self, keys: Sequence[StepKey]) -> list[list[StepKey]]:
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
        document = self._job.document(keys, tree.began_ns)
        if self._dataset is not None:
            self._dataset(trace_of(document, self._out, is_live=True))
        tree.add(document)
        self._written_at = time.monotonic()
        self._took_s = self._written_at - began
