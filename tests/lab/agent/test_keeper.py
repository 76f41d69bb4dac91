"""Full tensors kept by a rank: bounds of its tables, odd bytes, threads, and what never arrives."""

from __future__ import annotations

import threading

import numpy as np
import torch

from rankscope.agent.values import tensorstore as stores
from rankscope.spool.chunks.chunkfiles import damaged_references
from rankscope.spool.chunks.tensorfiles import standing_references
from rankscope.spool.chunks.writing import HEADER_BYTES
from tests.agent.keepers import Rank, same


def test_large_tensors_out_of_order_are_also_stored_once(tmp_path):
    rank = Rank(tmp_path)
    tensor = torch.randn(3000, 1000)
    assert rank.keep(tensor) == rank.keep(tensor.T.contiguous().T) == 1
    small = rank.keep(torch.ones(3))
    assert rank.keep(tensor.T) == 3 == rank.keep(tensor.T.contiguous())
    stored = rank.close()
    assert sorted(stored) == [1, small, 3]
    assert same(stored[3], tensor.T) and same(stored[small], torch.ones(3))
    (path,) = rank.folder.iterdir()
    assert path.stat().st_size == 8 + HEADER_BYTES + 2 * tensor.nbytes + 12


def test_minus_zero_is_not_zero_and_every_nan_stays_itself(tmp_path):
    rank = Rank(tmp_path)
    tensors = [
        torch.zeros(4), -torch.zeros(4), torch.full((4,), float("nan")),
        torch.tensor([0x7FC00001] * 4, dtype=torch.int32).view(torch.float32),
    ]  # fmt: skip
    references = [rank.keep(tensor) for tensor in tensors]
    assert references == [1, 2, 3, 4]
    stored = rank.close()
    assert all(same(stored[r], t) for r, t in zip(references, tensors))


def test_the_table_of_what_is_stored_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_MOST_STORED", 10)
    rank = Rank(tmp_path)
    first = [rank.keep(torch.full((3,), float(n))) for n in range(30)]
    assert [rank.keep(torch.full((3,), float(n))) for n in range(20, 30)] == first[20:]
    assert rank.keep(torch.full((3,), 0.0)) == 31  # forgotten: stored again, not lost
    assert len(rank.store._stored) == 10
    assert len(rank.close()) == 31


def test_reasons_are_bounded_however_many_kinds_of_tensors_there_are(tmp_path):
    rank = Rank(tmp_path)
    for number in range(200):
        described = rank.describer.describe_other(f"odd thing {number}")
        assert rank.keeper.keep(torch.ones(2), described) == 0
    assert len(rank.told) == len(rank.keeper.notes()) <= 51
    assert sum(int(line.split()[0]) for line in rank.keeper.notes()) == 200


def test_what_finds_no_room_on_its_way_from_a_device_is_said_and_the_next_is_kept(tmp_path):
    rank = Rank(tmp_path, memory=10_000)
    huge = rank.keep(torch.ones(5000), as_if_on_device=True)
    # each second one finds the ring full, and makes room by storing what has arrived
    others = [rank.keep(torch.full((1500,), float(n)), as_if_on_device=True) for n in range(10)]
    assert huge == 0 and all(others)
    stored = rank.close()
    assert [stored[reference][0].item() for reference in others] == list(range(10))
    assert any("--rs-tensor-memory" in line for line in rank.told)


def test_a_reference_whose_bytes_never_arrived_stands_for_nothing(tmp_path):
    rank = Rank(tmp_path)
    first = rank.keep(torch.ones(3), as_if_on_device=True)
    rank.keeper.collect()
    second = rank.keep(torch.zeros(3), as_if_on_device=True)
    alias = rank.keep(torch.ones(3), as_if_on_device=True)
    # killed here: nothing more arrives
    tensors, _ = rank.recorded()
    keys = standing_references(np.array([first, second, alias, 0], np.uint64), tensors)
    assert keys.tolist() == [first, 0, 0, 0]
    rank.close()
    tensors, _ = rank.recorded()
    keys = standing_references(np.array([first, second, alias, 0], np.uint64), tensors)
    assert keys.tolist() == [first, second, first, 0]


def test_several_threads_keep_into_one_chunk(tmp_path):
    rank = Rank(tmp_path, spool_bytes=8 << 20, chunk_tensors=50)
    wanted: dict[int, torch.Tensor] = {}

    def work(first: int) -> None:
        for number in range(first, first + 100):
            tensor = torch.full((500,), float(number))
            reference = rank.keep(tensor, as_if_on_device=number % 4 == 0)
            wanted[reference] = tensor.clone()
            tensor.zero_()

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = rank.close()
    assert len(wanted) == 400 == len(stored) and 0 not in wanted
    assert all(same(stored[reference], tensor) for reference, tensor in wanted.items())
    for path in rank.folder.iterdir():
        assert damaged_references(path) == []
