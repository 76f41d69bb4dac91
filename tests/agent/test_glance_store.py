"""Tensors that are looked at and not kept: each once for its bytes and how they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.agent.values.bytestores import Glance, GlanceStore, Stored
from rankscope.agent.values.tensorstore import TensorStore
from rankscope.capture.describe import Described, Describer
from rankscope.capture.invisible import invisible


class Rank:
    """A keeper that adds up what it is given, and what it recorded."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, ...]] = []
        self.has_room = True
        self.told: list[str] = []
        self.store = GlanceStore(self._look, self._record)
        self.keeper = TensorStore(
            ("**",), self.store, self._record, memory_bytes=1 << 20, tell=self.told.append
        )
        self._describer = Describer(0)

    def _look(self, tensor: torch.Tensor, stride: tuple[int, ...]) -> float:
        self.looks.append(stride or tuple(tensor.stride()))
        return float(tensor.double().sum())

    def _record(self, reference: int, entry: Stored, described: Described) -> bool:
        return self.has_room

    def keep(self, tensor: torch.Tensor, *, as_on_device: bool = False) -> int:
        with invisible():
            described, local = self._describer.describe(tensor)
            if as_on_device:
                described = replace(described, can_digest=False, can_digest_on_device=True)
            return self.keeper.keep(local, described)


@pytest.fixture
def rank() -> Iterator[Rank]:
    found = Rank()
    yield found
    found.keeper.close()


def test_what_is_equal_and_lies_alike_is_looked_at_once(rank: Rank) -> None:
    """torch's sums depend on the order in memory, in their last digits: so strides count."""
    a = torch.arange(6.0).reshape(2, 3)
    given = a, a.clone(), a.t(), a.t().clone(), a.t().contiguous(), a + 1
    assert [rank.keep(t) for t in given] == [1, 1, 2, 2, 3, 4]
    assert rank.looks == [(3, 1), (1, 3), (2, 1), (3, 1)]
    made = rank.store.made()
    assert made[2].checksum == made[3].checksum != made[1].checksum


def test_what_changes_in_place_is_looked_at_again(rank: Rank) -> None:
    """Not even its version tells: `.data` leaves it as it is."""
    a = torch.zeros(3)
    first = rank.keep(a)
    a.data.add_(1)
    assert rank.keep(a) != first
    assert [glance.made for glance in rank.store.made().values()] == [0.0, 3.0]


def test_what_an_accelerator_held_comes_with_the_strides_it_had(rank: Rank) -> None:
    a = torch.arange(6.0).reshape(2, 3).t()
    assert rank.keep(a, as_on_device=True) == 1
    rank.keeper.collect(wait=True)
    assert rank.looks == [(1, 3)] and rank.store.made()[1].made == 15.0
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


def test_what_is_let_go_is_looked_at_again(rank: Rank) -> None:
    a = torch.ones(2)
    rank.keeper.release(rank.keep(a))
    assert rank.store.made() == {}
    assert rank.keep(a) == 2 and len(rank.looks) == 2


def test_what_the_spool_has_no_room_for_is_not_kept(rank: Rank) -> None:
    rank.has_room = False
    assert rank.keep(torch.ones(2)) == 0
    assert rank.store.made() == {} and "the spool is full" in rank.told[0]


def test_a_closed_store_makes_no_more(rank: Rank) -> None:
    rank.keep(torch.ones(2))
    rank.keeper.close()
    assert rank.keep(torch.zeros(2)) == 0
    (made,) = rank.store.made().values()
    assert isinstance(made, Glance)


def test_from_now_on_bytes_are_kept_elsewhere(rank: Rank) -> None:
    """References go on where they were."""
    other = GlanceStore(rank._look, rank._record)
    rank.keep(torch.ones(2))
    rank.keeper.store_in(other)
    assert rank.keep(torch.ones(2)) == 2
    assert [*rank.store.made()] == [1] and [*other.made()] == [2]
