"""Which modules are alike: folded where they are, apart where anything differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.tree.alikemodules import (
    ModuleOutline,
    difference,
    module_outlines,
    numbered_groups,
)
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.diagnosis.paper import PAIR, collective, numbers
from tests.tree.ranks_on_paper import PaperRank

Odd = Callable[[PaperRank, int], None]


def block(rank: PaperRank, path: str, **other: Any) -> None:
    """Record a block with one linear layer; `other` is what is not as in the others."""
    how = {"class_name": other.get("class_name", "Block"), "wrappers": other.get("wrappers", [])}
    for _ in range(other.get("calls", 1)):
        with rank.call(path, **how) as call:
            inner = other.get("inner", "fc")
            with rank.call(f"{path}.{inner}", class_name=other.get("kind", "Linear")) as linear:
                value = other.get("value", numbers(1))
                place = other.get("place", {})
                rank.value(linear, other.get("slot", "output"), value, **place)
                if other.get("talks"):
                    collective(rank, f"{path}.{inner}", 1, value, 2 * value, parent=linear)
            if other.get("backward", True):
                rank.value(call, "grad_output.0", numbers(2), phase=Phase.BACKWARD)
            last = rank.enter(f"{path}.end", parent=call)
            rank.exit(last, other.get("status", CallStatus.RETURNED))


def layers(folder: Path, odd: Odd) -> list[ModuleOutline]:
    """Return the five layers of a model on two ranks, in which `odd` wrote layer 2."""
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        with rank.call(class_name="Model"):
            for layer in range(5):
                if layer == 2:
                    odd(rank, number)
                else:
                    block(rank, f"layers.{layer}")
        rank.end()
        rank.ship(folder / "trace")
    build(folder / "trace")
    (root,) = module_outlines(open_trace(folder / "trace").steps[0].nodes)
    return list(root.children["layers"].children.values())


def folded(modules: list[ModuleOutline], **standing: str) -> list[str]:
    (row,) = numbered_groups(modules, standing)
    return [group.path for group in row]


def test_layers_that_are_alike_are_one_group(tmp_path: Path) -> None:
    def other_numbers(rank: PaperRank, _: int) -> None:
        block(rank, "layers.2", value=numbers(77))

    found = layers(tmp_path, other_numbers)
    assert folded(found) == ["layers.0-4"], "numbers may differ"
    assert difference(found[2], found[0]) is None


PLACE = {"mesh": PAIR, "placements": ["Replicate()"], "whole": (4, 6)}
ODD: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "class": ({"class_name": "Other"}, ("", "", "class")),
    "class of a module inside": ({"kind": "Conv"}, ("fc", "", "class")),
    "module inside": ({"inner": "gc"}, ("fc", "", "module")),
    "dtype": ({"place": {"dtype": "bfloat16"}}, ("fc", "forward", "output")),
    "shape": ({"value": numbers(1, 4, 7)}, ("fc", "forward", "output")),
    "layout": ({"place": PLACE}, ("fc", "forward", "output")),
    "slot": ({"slot": "output.0"}, ("fc", "forward", "output")),
    "calls": ({"calls": 2}, ("", "forward", "calls")),
    "phase": ({"backward": False}, ("", "backward", "calls")),
    "wrappers": ({"wrappers": ["FSDP2"]}, ("", "", "wrappers")),
    "collective": ({"talks": True}, ("fc", "", "collectives")),
    "how a call ended": ({"status": CallStatus.RAISED}, ("end", "forward", "ended")),
}


@pytest.mark.parametrize("what", ODD)
def test_a_layer_that_differs_stands_alone_with_what_differs(tmp_path: Path, what: str) -> None:
    other, expected = ODD[what]
    found = layers(tmp_path, lambda rank, _: block(rank, "layers.2", **other))
    assert folded(found) == ["layers.0-1", "layers.2", "layers.3-4"]
    unlike = difference(found[2], found[0])
    assert unlike is not None
    assert (unlike.path, unlike.phase, unlike.fact) == expected


def test_a_layer_on_other_ranks_stands_alone(tmp_path: Path) -> None:
    def on_one(rank: PaperRank, number: int) -> None:
        if not number:
            block(rank, "layers.2")

    found = layers(tmp_path, on_one)
    assert folded(found) == ["layers.0-1", "layers.2", "layers.3-4"]
    assert [each.ranks for each in found] == ["0-1", "0-1", "0", "0-1", "0-1"]


def test_collectives_of_the_backward_pass_make_no_layer_unlike(tmp_path: Path) -> None:
    """FSDP gathers the layer before early: the last layer of all does it twice."""

    def early(rank: PaperRank, number: int) -> None:
        block(rank, "layers.2")
        with rank.call("layers.2", class_name="Block", ordinal=0) as call:
            value = numbers(1)
            collective(rank, "layers.2", 1, value, 2 * value, parent=call, issuer="backward")

    def plain(rank: PaperRank, number: int) -> None:
        block(rank, "layers.2")
        with rank.call("layers.2", class_name="Block", ordinal=0):
            pass

    ours, theirs = (layers(tmp_path / str(i), odd)[2] for i, odd in enumerate((early, plain)))
    assert ours.facts == theirs.facts


def test_what_is_said_of_a_layer_keeps_it_apart(tmp_path: Path) -> None:
    found = layers(tmp_path, lambda rank, _: block(rank, "layers.2"))
    assert folded(found, **{"layers.2": "fault"}) == ["layers.0-1", "layers.2", "layers.3-4"]
    assert folded(found, **{f"layers.{n}": "infected" for n in (3, 4)}) == [
        "layers.0-2",
        "layers.3-4",
    ]


def outlines(folder: Path, names: list[tuple[str, str]]) -> list[ModuleOutline]:
    """Return modules of one rank: (path, class)."""
    rank = PaperRank(folder)
    with rank.call(class_name="Model"):
        for path, kind in names:
            with rank.call(path, class_name=kind):
                pass
    rank.end()
    rank.ship(folder / "trace")
    build(folder / "trace")
    (root,) = module_outlines(open_trace(folder / "trace").steps[0].nodes)
    return [module for module in root.walk() if module.class_name not in ("", "Model")]


def test_layers_of_two_kinds_in_turn_are_two_groups(tmp_path: Path) -> None:
    names = [(f"layers.{n}", ("Dense", "Experts")[n % 2]) for n in range(12)]
    assert folded(outlines(tmp_path, names)) == ["layers.0,2,4,6,8,10", "layers.1,3,5,7,9,11"]
