"""How values lie that nothing describes: what cut weights, equal bytes and modules prove of them,
and what they do not.
"""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from rankscope.layout.infer import WHOLE, Proof, ShownValues, cut
from rankscope.layout.placement import Placement, PlacementKind

Shape = tuple[int, ...]
RANKS = (0, 1)


def shown(class_name: str = "Linear", weight: Placement | None = None) -> ShownValues:
    """A module `up` with a weight of [12, 4] in all, of which each of two ranks has a part."""
    found = ShownValues({"tp": [RANKS]})
    found.modules["up"] = "up", class_name
    placement = weight or cut(0)
    part = {0: (6, 4), 1: (12, 2)}.get(placement.dim if placement.dim is not None else -1, (12, 4))
    found.note_cut(("up", "param:weight"), "tp", placement, dict.fromkeys(RANKS, part), (12, 4))
    return found


def held(
    found: ShownValues,
    call: str,
    slot: str,
    shape: Shape,
    prints: tuple[Hashable, ...] = ("a", "b"),
) -> None:
    shapes, known = dict.fromkeys(RANKS, shape), dict(enumerate(prints))
    found.note((call, slot), shapes, known, is_twin=True)


def said(found: ShownValues, call: str, slot: str) -> Placement | None:
    known = Proof(found).known.get(((call, slot), "tp"))
    return known.placement if known else None


def test_equal_bytes_are_whole_and_constants_prove_nothing() -> None:
    found = shown()
    held(found, "up", "input.0", (3, 4), ("same", "same"))
    held(found, "act", "input.0", (3, 4), ())
    assert said(found, "up", "input.0") == WHOLE
    assert said(found, "act", "input.0") is None


def test_what_is_the_same_in_one_record_and_not_in_another_is_not_whole() -> None:
    found = shown()
    held(found, "up", "input.0", (3, 4), ("same", "same"))
    held(found, "up", "input.0", (3, 4), ("one", "other"))
    assert said(found, "up", "input.0") is None


@pytest.mark.parametrize(
    ("class_name", "weight", "slot", "size", "expected"),
    [
        ("Linear", cut(0), "output", 6, cut(1)),
        ("Linear", cut(0), "output", 12, None),
        ("Linear", cut(1), "input.0", 2, cut(1)),
        ("Linear", cut(1), "input.input", 2, cut(1)),
        ("Embedding", cut(1), "output", 2, cut(1)),
        ("Embedding", cut(0), "output", 6, None),
        ("MyLinear", cut(0), "output", 6, None),
        ("Linear", Placement(kind=PlacementKind.REPLICATE), "output", 12, None),
    ],
)
def test_the_weight_tells_the_last_dim(
    class_name: str, weight: Placement, slot: str, size: int, expected: Placement | None
) -> None:
    found = shown(class_name, weight)
    held(found, "up", slot, (3, size))
    assert said(found, "up", slot) == expected


def test_uneven_parts_are_held_to_each_ranks_own() -> None:
    found = ShownValues({"tp": [RANKS]})
    found.modules["up"] = "up", "Linear"
    found.note_cut(("up", "param:weight"), "tp", cut(0), {0: (7, 4), 1: (5, 4)}, (12, 4))
    found.note(("up", "output"), {0: (3, 7), 1: (3, 5)}, {0: "a", 1: "b"})
    known = Proof(found).known[("up", "output"), "tp"]
    assert (known.placement, known.length) == (cut(1), 12)
    found.note(("up", "output.0"), {0: (3, 5), 1: (3, 7)}, {0: "a", 1: "b"})
    assert (("up", "output"), "tp") not in Proof(found).known


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3, 6), cut(1)), ((3, 2, 3), cut(1)), ((18,), None), ((3, 1, 6), None)],
)
def test_twins_lie_alike_in_other_shapes_as_far_as_one_dim_can_be_the_cut_one(
    shape: Shape, expected: Placement | None
) -> None:
    found = shown()
    held(found, "up", "output", (3, 6))
    held(found, "next", "input.0", shape)
    assert said(found, "next", "input.0") == expected


def test_a_few_elements_have_no_twin() -> None:
    found = shown()
    held(found, "up", "output", (1, 6))
    held(found, "next", "input.0", (1, 6))
    assert said(found, "up", "output") == cut(1)
    assert said(found, "next", "input.0") is None


@pytest.mark.parametrize("reason", ["weights", "a collective", "another shape", "equal bytes"])
def test_a_cut_goes_through_a_module_unless_something_is_against_it(reason: str) -> None:
    found = shown()
    held(found, "up", "output", (3, 6))
    for call in ("act", "odd"):
        found.modules[call] = call, "GELU"
        held(found, call, "input.0", (3, 6))
    held(found, "act", "output", (3, 6), ("c", "d"))
    bytes_of = ("e", "e") if reason == "equal bytes" else ("e", "f")
    held(found, "odd", "output", (3, 12) if reason == "another shape" else (3, 6), bytes_of)
    if reason == "weights":
        held(found, "odd", "param:weight", (6, 6), ("w", "x"))
    elif reason == "a collective":
        found.issued["odd", "tp"] = {("forward", "all_reduce")}
    assert said(found, "act", "output") == cut(1)
    assert said(found, "odd", "output") is None


def test_a_rank_alone_proves_shards_and_nothing_whole() -> None:
    found = ShownValues({"tp": [RANKS]})
    found.modules["up"] = "up", "Linear"
    found.note_cut(("up", "param:weight"), "tp", cut(0), {1: (6, 4)}, (12, 4))
    found.note(("up", "input.0"), {1: (3, 4)}, {1: "a"})
    found.note(("up", "output"), {1: (3, 6)}, {1: "b"})
    assert said(found, "up", "output") == cut(1)
    assert said(found, "up", "input.0") is None
