"""What the debugger keeps of tensors: glimpses, or bytes in a file without a name; equal ones once,
what is let go, and what is refused.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.agent.values.tensorstore import TensorStore
from rankscope.capture.describe import Described, Describer
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.compat.debugger import kept
from rankscope.compat.debugger.kept import DebuggerStore
from rankscope.spool.chunks.writing import ChunkEntry


class Rank:
    """A store with what asks it, and what it recorded."""

    def __init__(self, folder: Path, *, keeps_bytes: bool, limit_bytes: int = 1 << 30) -> None:
        self.recorded: list[tuple[int, ChunkEntry]] = []
        self.has_room = True
        self.told: list[str] = []
        self.store = DebuggerStore(self._record, limit_bytes, folder, keeps_bytes=keeps_bytes)
        self.keeper = TensorStore(
            ("**",), self.store, self._record, memory_bytes=1 << 20, tell=self.told.append
        )
        self._describer = Describer(0)

    def _record(self, reference: int, entry: ChunkEntry, described: Described) -> bool:
        if self.has_room:
            self.recorded.append((reference, entry))
        return self.has_room

    def keep(self, tensor: torch.Tensor, *, as_on_device: bool = False) -> int:
        with invisible():
            described, local = self._describer.describe(tensor)
            if as_on_device:
                described = replace(described, can_digest=False, can_digest_on_device=True)
            return self.keeper.keep(local, described)

    def held(self) -> dict[int, bytes | None]:
        found = {n: self.store.find(0, 0, n) for n in range(1, 20)}
        data = {n: tensor.data for n, tensor in found.items() if tensor}
        return {n: None if each is None else each.tobytes() for n, each in data.items()}


def plain(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """Keeps glimpses."""
    made = Rank(tmp_path, keeps_bytes=False)
    yield made
    made.keeper.close()


@pytest.fixture
def byte_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Keeps bytes."""
    monkeypatch.setattr(kept, "_LOOK_EVERY", 1)
    made = Rank(tmp_path, keeps_bytes=True)
    yield made
    made.keeper.close()
    made.store.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Strides of the tensors that were looked at; watched, not changed."""
    seen, look = list[tuple[int, ...]](), kept.glimpse_of

    def watched(tensor: torch.Tensor, stride: tuple[int, ...] = (), **more: Any) -> object:
        seen.append(stride or tuple(tensor.stride()))
        return look(tensor, stride, **more)

    monkeypatch.setattr(kept, "glimpse_of", watched)
    return seen


# ---------------------------------------------------------------------- bytes


def test_equal_tensors_have_one_reference_and_numbers_have_no_gaps(byte_rank: Rank) -> None:
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(6.0)
    given = a, b, a.clone(), a.t(), a.t().contiguous(), b + 1
    assert [byte_rank.keep(t) for t in given] == [1, 2, 1, 3, 3, 4]
    assert byte_rank.held() == {1: plain(a), 2: plain(b), 3: plain(a.t()), 4: plain(b + 1)}
    assert [number for number, _ in byte_rank.recorded] == [1, 2, 3, 4]


def test_bytes_of_every_size_are_those_of_the_tensor_and_no_file_has_a_name(
    byte_rank: Rank, tmp_path: Path
) -> None:
    given = [torch.arange(size) for size in (0, 1, 7, 4096, 1 << 20, 12345)]
    references = [byte_rank.keep(tensor) for tensor in given]
    assert byte_rank.held() == {n: plain(t) for n, t in zip(references, given)}
    assert [*tmp_path.iterdir()] == []


def test_it_holds_what_the_tensor_was(byte_rank: Rank) -> None:
    tensor = torch.ones(5)
    assert byte_rank.keep(tensor) == 1
    tensor.numpy()[2] = 7
    assert byte_rank.keep(tensor) == 2
    assert byte_rank.held() == {1: plain(torch.ones(5)), 2: plain(tensor)}


def test_what_is_written_meanwhile_is_never_taken_for_what_was_hashed(
    byte_rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, pieces = torch.zeros(100), kept.byte_pieces

    def late(live: torch.Tensor) -> Iterator[kept.ByteArray]:
        live.fill_(3)
        yield from pieces(live)

    monkeypatch.setattr(kept, "byte_pieces", late)
    assert byte_rank.keep(tensor) == 1
    monkeypatch.setattr(kept, "byte_pieces", pieces)
    assert byte_rank.keep(torch.zeros(100)) == 2 and byte_rank.keep(torch.full((100,), 3.0)) == 1
    assert byte_rank.held() == {1: plain(torch.full((100,), 3.0)), 2: plain(torch.zeros(100))}


def test_the_place_of_what_is_let_go_is_used_again(byte_rank: Rank) -> None:
    tensor, other = torch.arange(2000.0), torch.ones(7)
    assert [byte_rank.keep(each) for each in (tensor, other)] == [1, 2]
    byte_rank.store.unneeded = [(), (1, 1, 77)].pop
    assert byte_rank.keep(tensor + 1) == 3 and byte_rank.keep(tensor) == 4
    assert byte_rank.held() == {2: plain(other), 3: plain(tensor + 1), 4: plain(tensor)}
    assert [entry.begin for _, entry in byte_rank.recorded] == [0, 8000, 0, 8064]


def test_what_shares_its_bytes_with_a_later_reference_stays(byte_rank: Rank) -> None:
    tensor = torch.arange(100.0)
    first, second = (byte_rank.keep(tensor, as_on_device=True) for _ in range(2))
    byte_rank.keeper.collect(wait=True)
    assert first != second
    assert {entry.reference for _, entry in byte_rank.recorded} == {first}
    byte_rank.store.unneeded = lambda: [first]
    other = byte_rank.keep(torch.ones(1))
    assert byte_rank.held() == {first: plain(tensor), other: plain(torch.ones(1))}


def test_without_room_it_says_so_and_goes_on(tmp_path: Path) -> None:
    rank = Rank(tmp_path, keeps_bytes=True, limit_bytes=1000)
    assert rank.keep(torch.zeros(500)) == 0
    rank.has_room = False
    assert rank.keep(torch.zeros(50)) == 0
    rank.has_room = True
    assert rank.keep(torch.ones(50)) == 1
    assert rank.recorded[0][1].begin == 0
    rank.keeper.close()
    assert rank.keep(torch.ones(7)) == 0
    assert rank.told == [
        "tensors are not kept: the disk budget is used up (--rs-tensor-budget)",
        "tensors are not kept: the spool is full (--rs-spool-bytes)",
        "1 tensor (0.0 MB) was not kept: the disk budget is used up (--rs-tensor-budget)",
        "1 tensor (0.0 MB) was not kept: the spool is full (--rs-spool-bytes)",
        "tensors are not kept: the trace is closed",
    ]
    rank.store.close()


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_the_system_refuses_is_told_and_costs_no_other(
    byte_rank: Rank, limit_files: Callable[[int], None]
) -> None:
    byte_rank.keep(torch.arange(3.0))  # the file is there, of its full length
    limit_files(1 << 16)
    tensor, refused = torch.arange(1000.0), torch.zeros(1 << 15)
    references = [byte_rank.keep(each) for each in (tensor, refused, tensor + 1)]
    assert references == [2, 0, 3]
    assert byte_rank.held() == {1: plain(torch.arange(3.0)), 2: plain(tensor), 3: plain(tensor + 1)}
    assert byte_rank.told == ["tensors are not kept: they cannot be written: File too large"]


def test_a_file_of_the_program_under_its_number_is_left_alone(
    byte_rank: Rank, tmp_path: Path
) -> None:
    byte_rank.keep(torch.ones(900))
    file = byte_rank.store._scratch._file
    assert file is not None
    number = file.number
    os.close(number)
    with open(tmp_path / "own", "w+b") as own:
        assert own.fileno() == number or os.dup2(own.fileno(), number) == number
        assert byte_rank.keep(torch.zeros(100)) == 0
        assert "the program has closed it" in byte_rank.told[0]
        assert byte_rank.held() == {1: plain(torch.ones(900))}
        byte_rank.store.close()
        os.fstat(number)
        assert (tmp_path / "own").read_bytes() == b""
        if own.fileno() != number:
            os.close(number)


# ---------------------------------------------------------------------- glimpses


def test_what_is_equal_and_lies_alike_is_looked_at_once(
    rank: Rank, looks: list[tuple[int, ...]]
) -> None:
    """torch's sums depend on the order in memory, in their last digits: so strides count."""
    a = torch.arange(6.0).reshape(2, 3)
    given = a, a.clone(), a.t(), a.t().clone(), a.t().contiguous(), a + 1
    assert [rank.keep(t) for t in given] == [1, 1, 2, 2, 3, 4]
    assert looks == [(3, 1), (1, 3), (2, 1), (3, 1)]
    one, two, three = (rank.store.find(0, 0, n) for n in (1, 2, 3))
    assert one and two and three and two.checksum == three.checksum != one.checksum
    assert rank.held() == dict.fromkeys(range(1, 5))


def test_what_changes_in_place_is_looked_at_again(rank: Rank) -> None:
    """Not even its version tells: `.data` leaves it as it is."""
    a = torch.zeros(3)
    first = rank.keep(a)
    a.data.add_(1)
    assert rank.keep(a) != first
    found = [rank.store.find(0, 0, n) for n in (1, 2)]
    assert [each.glimpse.numbers["max"] for each in found if each and each.glimpse] == [0.0, 1.0]


def test_what_an_accelerator_held_comes_with_the_strides_it_had(
    rank: Rank, looks: list[tuple[int, ...]]
) -> None:
    a = torch.arange(6.0).reshape(2, 3).t()
    assert rank.keep(a, as_on_device=True) == 1
    rank.keeper.collect(wait=True)
    found = rank.store.find(0, 0, 1)
    assert looks == [(1, 3)] and found and found.glimpse and found.glimpse.numbers["mean"] == 2.5
    assert rank.keep(torch.empty(0, 3), as_on_device=True) == 2


def test_nothing_that_watches_operations_sees_the_look(rank: Rank) -> None:
    """A mode of the program (selective checkpointing is one) would take it for the model's."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # as torch declares it
            raise AssertionError(f"{func} was seen")

    a = torch.randn(4, 4, requires_grad=True)
    with Watching():
        assert rank.keep(a) == 1
    assert a.grad_fn is None and a._version == 0


def test_what_is_let_go_is_looked_at_again(
    rank: Rank, looks: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_LOOK_EVERY", 1)
    a = torch.ones(2)
    let_go = [rank.keep(a)]
    rank.store.unneeded = lambda: let_go
    assert rank.keep(a) == 2 and len(looks) == 2
    assert [*rank.held()] == [2]


def test_what_the_spool_has_no_room_for_is_not_kept(rank: Rank) -> None:
    rank.has_room = False
    assert rank.keep(torch.ones(2)) == 0
    assert rank.held() == {} and "the spool is full" in rank.told[0]


def test_a_closed_store_keeps_no_more(rank: Rank) -> None:
    rank.keep(torch.ones(2))
    rank.keeper.close()
    assert rank.keep(torch.zeros(2)) == 0
    assert [*rank.held()] == [1]


def test_from_now_on_bytes_are_kept(rank: Rank) -> None:
    """References go on where they were."""
    rank.keep(torch.ones(2))
    rank.store.keep_bytes()
    rank.store.keep_bytes()
    assert rank.keep(torch.ones(2)) == 2
    assert rank.held() == {1: None, 2: plain(torch.ones(2))}
    rank.store.close()
