"""Tensors kept in a scratch: equal ones once, references that share bytes, and what is refused."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rankscope.agent.values.bytestores import ScratchStore, Stored
from rankscope.agent.values.tensorstore import TensorStore
from rankscope.capture.describe import Described, Describer
from rankscope.capture.invisible import invisible
from rankscope.chunks.scratch import Scratch


class Rank:
    """A keeper over a scratch, and what it recorded."""

    def __init__(self, folder: Path, limit_bytes: int = 1 << 30) -> None:
        self.scratch = Scratch(folder, limit_bytes)
        self.recorded: list[tuple[int, Stored]] = []
        self.has_room = True
        self.told: list[str] = []
        self.keeper = TensorStore(
            ("**",), ScratchStore(self.scratch, self._record), self._record,
            memory_bytes=1 << 20, tell=self.told.append,
        )  # fmt: skip
        self._describer = Describer(0)

    def _record(self, reference: int, entry: Stored, described: Described) -> bool:
        if self.has_room:
            self.recorded.append((reference, entry))
        return self.has_room

    def keep(self, tensor: torch.Tensor, *, as_on_device: bool = False) -> int:
        with invisible():
            described, local = self._describer.describe(tensor)
            if as_on_device:
                described = replace(described, can_digest=False, can_digest_on_device=True)
            return self.keeper.keep(local, described)

    def held(self) -> dict[int, bytes]:
        return {number: data.tobytes() for number, (_, data) in self.scratch.held().items()}


def plain(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def test_equal_tensors_have_one_reference_and_numbers_have_no_gaps(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(6.0)
    assert [rank.keep(t) for t in (a, b, a.clone(), a.t(), a.t().contiguous(), b + 1)] == [
        1, 2, 1, 3, 3, 4,
    ]  # fmt: skip
    assert rank.held() == {1: plain(a), 2: plain(b), 3: plain(a.t()), 4: plain(b + 1)}
    assert [number for number, _ in rank.recorded] == [1, 2, 3, 4]


def test_it_holds_what_the_tensor_was(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    tensor = torch.ones(5)
    assert rank.keep(tensor) == 1
    tensor.numpy()[2] = 7
    assert rank.keep(tensor) == 2
    assert rank.held() == {1: plain(torch.ones(5)), 2: plain(tensor)}


def test_what_was_let_go_is_stored_anew(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    tensor = torch.arange(2000.0)
    assert rank.keep(tensor) == 1
    rank.keeper.release(1)
    assert rank.held() == {} and rank.keep(tensor) == 2 and rank.held() == {2: plain(tensor)}


def test_what_shares_its_bytes_with_a_later_reference_stays(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    tensor = torch.arange(100.0)
    first, second = (rank.keep(tensor, as_on_device=True) for _ in range(2))
    rank.keeper.collect(wait=True)
    assert first != second and {entry.reference for _, entry in rank.recorded} == {first}
    rank.keeper.release(first)
    assert rank.held() == {first: plain(tensor)}


def test_without_room_it_says_so_and_goes_on(tmp_path: Path) -> None:
    rank = Rank(tmp_path, limit_bytes=1000)
    assert rank.keep(torch.zeros(500)) == 0
    rank.has_room = False
    assert rank.keep(torch.zeros(50)) == 0
    rank.has_room = True
    assert rank.keep(torch.ones(50)) == 1
    rank.keeper.close()
    assert rank.keep(torch.ones(7)) == 0
    assert rank.told == [
        "tensors are not kept: the disk budget is used up (--rs-tensor-budget)",
        "tensors are not kept: the spool is full (--rs-spool-bytes)",
        "1 tensors (0.0 MB) were not kept: the disk budget is used up (--rs-tensor-budget)",
        "1 tensors (0.0 MB) were not kept: the spool is full (--rs-spool-bytes)",
        "tensors are not kept: the trace is closed",
    ]


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_the_system_refuses_is_told_and_costs_no_other(
    tmp_path: Path, small_files: None
) -> None:
    rank = Rank(tmp_path, limit_bytes=1 << 20)
    os.ftruncate(rank.scratch._file.number, 0)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, most))
    kept, refused = torch.arange(1000.0), torch.zeros(1 << 15)
    assert rank.keep(kept) == 1 and rank.keep(refused) == 0 and rank.keep(kept + 1) == 2
    assert rank.held() == {1: plain(kept), 2: plain(kept + 1)}
    assert rank.told == ["tensors are not kept: they cannot be written: File too large"]
