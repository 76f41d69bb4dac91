"""Interrupts in the middle of keeping: what a reference was given for is what is found under it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import torch

from rankscope.spool.chunks.chunkfiles import finish_chunks
from tests.agent.keepers import STREAM, Rank, plainly, same
from tests.interrupts import interrupting


def test_a_storm_of_interrupts_never_gives_a_reference_twice_nor_loses_a_kept_tensor(
    tmp_path: Path,
) -> None:
    rank = Rank(tmp_path, spool_bytes=64 << 20, chunk_tensors=100)
    wanted, numbers = {}, itertools.count(1)

    def keep() -> None:
        for number in itertools.islice(numbers, 40):
            tensor = torch.full((4,), float(number))
            reference = rank.keep(tensor if number % 5 else tensor[::2])
            assert reference not in wanted
            wanted[reference] = tensor if number % 5 else tensor[::2]

    with interrupting(random.Random(1), 1e-4, 3e-3) as is_interrupted:
        interrupts = sum(is_interrupted(keep) for _ in range(500))
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
