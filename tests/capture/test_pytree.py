"""Slot names for every nesting, and descriptions of what is no tensor."""

from __future__ import annotations

import collections
import dataclasses
import enum
import time
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from rankscope.capture.pytree import describe_leaf, walk

T = torch.ones(1)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    cache: object = None


class Point(collections.namedtuple("Point", "x y")):
    pass


class Shouting:
    def __repr__(self) -> str:
        raise AssertionError("a user's __repr__ must never be called")


class Colour(enum.Enum):
    RED = Shouting()


def names(value: object, prefix: str = "output") -> list[str]:
    return [slot for slot, _ in walk(prefix, value)]


def test_a_single_tensor_has_the_slot_of_its_prefix() -> None:
    assert names(T) == ["output"]
    assert names(torch.nn.Parameter(T)) == ["output"]


def test_tuples_lists_and_nesting_add_positions_and_keys() -> None:
    assert names((T, T)) == ["output.0", "output.1"]
    assert names([T, (T, [T])]) == ["output.0", "output.1.0", "output.1.1.0"]
    assert names({"cache": {"key": T, 3: (T,)}}, "input") == ["input.cache.key", "input.cache.3.0"]
    assert names((None, T)) == ["output.0", "output.1"]


def test_dataclasses_named_tuples_and_mappings_are_walked_by_name() -> None:
    assert names(Output(T, [T])) == ["output.logits", "output.cache.0"]
    assert names(Point(T, T)) == ["output.x", "output.y"]
    assert names(MappingProxyType({"a": T})) == ["output.a"]
    assert names(torch.max(torch.ones(2, 2), dim=0)) == ["output.0", "output.1"]


def test_model_outputs_are_walked_by_their_keys() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutputWithPast(logits=T, hidden_states=(T, T))
    assert names(value) == ["output.logits", "output.hidden_states.0", "output.hidden_states.1"]


class Box:
    def __init__(self, inside: object) -> None:
        self.inside = inside


@dataclasses.dataclass
class Registered:
    inside: object


def test_pytree_nodes_are_walked_where_a_known_library_takes_them_apart() -> None:
    torch.export.register_dataclass(Registered)
    _pytree.register_pytree_node(
        Box, lambda box: ([box.inside], None), lambda children, _: Box(children[0])
    )
    try:
        assert names(Registered((T,))) == ["output.inside.0"]
        assert names(Box((T,))) == ["output"], "a function of the user's own, which may do anything"
    finally:
        _pytree._deregister_pytree_node(Box)


class Computes:
    """Whatever asks it, other than for its type, runs code of the user's own."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")


class Named(type):
    def __getattribute__(cls, name: str) -> object:
        if name in ("__module__", "__qualname__"):
            raise AssertionError(f"asked for {name}")
        return super().__getattribute__(name)


class LazyDict(collections.UserDict):  # type: ignore[type-arg]
    def __getitem__(self, key: object) -> object:
        raise AssertionError("computed")

    items = values = keys = __iter__ = __len__ = __getitem__  # type: ignore[assignment]


class LazyTuple(tuple):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        raise AssertionError("computed")

    __getitem__ = __len__ = __iter__  # type: ignore[assignment]


@dataclasses.dataclass
class Slots:
    __slots__ = ("inside",)
    inside: object


def test_containers_are_read_as_they_are_stored_and_never_asked_to_compute() -> None:
    lazy = LazyDict()
    lazy.data = {"a": T}
    assert names(lazy) == ["output.a"]
    assert names(collections.UserList([T, T])) == ["output.0", "output.1"]
    assert names(LazyTuple((T, T))) == ["output.0", "output.1"]
    assert names(Slots(T)) == ["output.inside"]
    assert names(MappingProxyType(lazy)) == ["output"]
    assert names(Computes()) == ["output"]
    assert describe_leaf(Computes()).endswith("test_pytree.Computes")
    assert describe_leaf(Named("Odd", (), {})).endswith("test_pytree.Odd")


def test_empty_arguments_have_no_slots_and_inner_empty_containers_one() -> None:
    assert names(()) == names({}) == []
    assert walk("input", ([],)) == [("input.0", [])]


def test_cycles_and_depth_end_as_leaves() -> None:
    loop: list[object] = [T]
    loop.append(loop)
    assert names(loop) == ["output.0", "output.1"]
    deep: object = T
    for _ in range(200):
        deep = (deep,)
    assert len(names(deep)) == 1


def test_a_container_that_raises_is_a_leaf() -> None:
    class Broken(collections.abc.Mapping):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> object:
            raise RuntimeError

        def __iter__(self) -> Any:
            raise RuntimeError

        def __len__(self) -> int:
            return 1

    assert names(Broken()) == ["output"]


def test_keys_that_read_alike_stay_apart() -> None:
    assert names({1: T, "1": T}) == ["output.1", "output.1#1"]


def test_the_cost_of_many_keys_grows_with_their_number_only() -> None:
    def seconds(keys: int) -> float:
        value = {f"key{i}": (T, {"a": i}) for i in range(keys)}
        assert len(walk("output", value)) == 2 * keys
        taken = []
        for _ in range(5):
            start = time.thread_time()
            walk("output", value)
            taken.append(time.thread_time() - start)
        return min(taken)

    assert seconds(5000) < 40 * seconds(500), "ten times the keys; a quadratic walk costs 100"


def test_long_lists_of_plain_numbers_are_one_leaf() -> None:
    assert names(list(range(100_000))) == ["output"]
    assert describe_leaf(list(range(100_000))).startswith("list of 100000: 0, 1, 2")


@pytest.mark.parametrize(("value", "text"), [
    (3, "3"), (True, "True"), (1.5, "1.5"), (None, "None"), ("a", "'a'"),
    (torch.float32, "torch.float32"),
    (torch.device("cpu"), "device(type='cpu')"), (torch.Size([2, 3]), "torch.Size([2, 3])"),
    (Colour.RED, "Colour.RED"),
    (slice(1, None), "slice(1, None, None)"), (np.float32(2.5), "float32(2.5)"),
    (np.zeros((2, 3)), "ndarray <f8 [2, 3]"),
    (10**1000, "int of 3322 bits"), (torch.relu, "function relu"), ([T], "list of 1"),
    ({}, "dict of 0"), (torch.nn.Linear, "class torch.nn.modules.linear.Linear"),
])  # fmt: skip
def test_plain_values_are_described_by_value(value: object, text: str) -> None:
    assert describe_leaf(value) == text


def test_unknown_objects_are_described_by_class_without_their_repr_or_address() -> None:
    text = describe_leaf(Shouting())
    assert text.endswith("test_pytree.Shouting")
    assert "0x" not in text
    assert len(describe_leaf("x" * 10_000)) <= 200
    assert "0x" not in describe_leaf(lambda: 0)
