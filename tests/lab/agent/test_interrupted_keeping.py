"""Interrupts in the middle of keeping: what a reference was given for is what is found under it."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import torch

from rankscope.spool.chunks.chunkfiles import finish_chunks
from tests.agent.keepers import STREAM, Rank, plainly, same


def test_a_storm_of_interrupts_never_gives_a_reference_twice_nor_loses_a_kept_tensor(
    tmp_path: Path,
) -> None:
    def interrupt(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    rank = Rank(tmp_path, spool_bytes=64 << 20, chunk_tensors=100)
    chosen, wanted, number, interrupts = random.Random(1), {}, 0, 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(500):
            try:
                signal.setitimer(signal.ITIMER_REAL, chosen.uniform(1e-4, 3e-3))
                for _ in range(40):
                    number += 1
                    tensor = torch.full((4,), float(number))
                    reference = rank.keep(tensor if number % 5 else tensor[::2])
                    assert reference not in wanted
                    wanted[reference] = tensor if number % 5 else tensor[::2]
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wanted[rank.keep(torch.ones(3))] = torch.ones(3)
    rank.keeper.close()
    rank.spool.close()
    assert interrupts > 50 and len(wanted) > 500 and 0 not in wanted
    tensors, definitions = rank.recorded()
    assert len(np.unique(tensors["reference"])) == len(tensors)
    # chunks whose end was interrupted are finished as those of a killed rank
    reports = finish_chunks(rank.folder, STREAM, tensors, definitions)
    assert not any(report.lost for report in reports)
    stored = dict(plainly(rank.folder))
    assert all(same(stored[reference], tensor) for reference, tensor in wanted.items())
    assert rank.told == []
