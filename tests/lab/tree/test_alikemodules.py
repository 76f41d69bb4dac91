"""Which modules are alike, where ranks, meshes and passes make it hard to tell."""

from __future__ import annotations

from pathlib import Path

from rankscope.layout.placement import Mesh
from rankscope.tree.alikemodules import (
    AlikeModules,
    difference,
    module_outlines,
    numbered_groups,
)
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.diagnosis.paper import PAIR, numbers
from tests.tree.ranks_on_paper import PaperRank
from tests.tree.test_alikemodules import PLACE, block, folded, layers, outlines


def test_a_layer_whose_ranks_hold_more_values_than_those_of_its_siblings_stands_alone(
    tmp_path: Path,
) -> None:
    def own(rank: PaperRank, number: int) -> None:
        block(rank, "layers.2", value=numbers(number))

    found = layers(tmp_path, own)
    assert folded(found) == ["layers.0-1", "layers.2", "layers.3-4"]
    unlike = difference(found[2], found[0])
    assert unlike is not None
    assert (unlike.path, unlike.fact) == ("fc", "output")
    (here,), (there,) = unlike.value, unlike.other_value
    assert "of 2 values over the ranks" in here and "of 1 value over the ranks" in there


def test_a_layer_on_meshes_of_another_kind_stands_alone(tmp_path: Path) -> None:
    """The placements alone read the same: `tp=Replicate()`."""

    def on(rank: PaperRank, path: str, mesh: Mesh) -> None:
        block(rank, path, place={**PLACE, "mesh": mesh})

    def odd(rank: PaperRank, number: int) -> None:
        on(rank, "layers.2", Mesh(axes=("tp",), shape=(1,), ranks=(number,)))
        on(rank, "layers.7", PAIR)
        on(rank, "layers.8", PAIR)

    found = layers(tmp_path, odd)
    assert folded(found) == ["layers.0-1", "layers.2", "layers.3-4", "layers.7-8"]
    unlike = difference(found[2], next(each for each in found if each.path == "layers.7"))
    assert unlike is not None and unlike.fact == "output"


def test_ranks_that_contradict_each_other_keep_their_layer_alone(
    tmp_path: Path,
) -> None:
    def unequal(rank: PaperRank, number: int) -> None:
        block(rank, "layers.2", value=numbers(number), place=PLACE)

    found = layers(tmp_path, unequal)
    assert folded(found) == ["layers.0-1", "layers.2", "layers.3-4"]


def test_ranks_that_disagree_in_dtype_on_one_mesh_keep_their_layer_alone(tmp_path: Path) -> None:
    def unequal(rank: PaperRank, number: int) -> None:
        dtype = ("bfloat16", "float32")[number]
        block(rank, "layers.2", place={**PLACE, "dtype": dtype})

    found = layers(tmp_path, unequal)
    assert folded(found) == ["layers.0-1", "layers.2", "layers.3-4"]
    unlike = difference(found[2], found[0])
    assert unlike is not None and (unlike.path, unlike.fact) == ("fc", "output")


def test_many_unlike_ones_are_one_group_that_says_how_many_kinds(tmp_path: Path) -> None:
    modules = outlines(tmp_path, [(f"experts.{n}", f"Expert{n % 20}") for n in range(40)])
    (row,) = numbered_groups(modules, {"experts.7": "fault"})
    assert [(group.path, group.kinds) for group in row] == [
        ("experts.0-6,8-39", 20),
        ("experts.7", 1),
    ]


def test_stages_that_run_side_by_side_are_in_order_and_other_modules_alone(tmp_path: Path) -> None:
    names = [("embed", "E"), ("h.0", "B"), ("h.10", "B"), ("h.9", "B"), ("g.0", "B"), ("h.1", "B")]
    rows = numbered_groups(outlines(tmp_path, names), {})
    assert [[group.path for group in row] for row in rows] == [["embed"], ["h.0-1,9-10"], ["g.0"]]
    assert isinstance(rows[0][0], AlikeModules)


def test_roots_beside_the_model_are_roots_whatever_their_names_look_like(tmp_path: Path) -> None:
    rank = PaperRank(tmp_path)
    big, small = rank.root("Model", 100), rank.root("Loss", 1)
    with rank.call(class_name="Model", root=big):
        pass
    for _ in range(2):
        with rank.call(class_name="Loss", root=small), rank.call("fc", root=small):
            pass
    rank.end()
    rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    found = module_outlines(open_trace(tmp_path / "trace").steps[0].nodes)
    assert [(each.path, list(each.children)) for each in found] == [("", []), ("@Loss", ["fc"])]


def test_a_path_of_thousands_of_parts_is_one_name_at_its_end(tmp_path: Path) -> None:
    path = ".".join("a" * 5_000)
    found = outlines(tmp_path, [(path, "Deep")])
    assert [module.path for module in found] == [path]
