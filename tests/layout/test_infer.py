"""What is inferred of ranks: which are replicas, which axes cut data; without a trace or torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import pytest

from rankscope.layout.infer import (
    AxisName,
    AxisUse,
    HeldParameter,
    axes_of,
    is_fsdp_axis,
    largest_mesh,
    lines_along,
    named_as,
)
from rankscope.layout.placement import Mesh, parse_placement

GRID = Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))
LINE = Mesh(axes=("axis0",), shape=(2,), ranks=(0, 1))
APART = [{0: "a", 1: "b", 2: "c", 3: "d"}]


def plain(prints: Mapping[int, Hashable], *, is_constant: bool = False) -> HeldParameter:
    return HeldParameter(placements={}, meshes=(), prints=prints, is_constant=is_constant)


def placed(mesh: Mesh, *texts: str) -> HeldParameter:
    placements = dict(zip(mesh.axes, map(parse_placement, texts)))
    return HeldParameter(placements=placements, meshes=(mesh,), prints={}, is_constant=False)


def uses(*owned: HeldParameter, wrappers: tuple[str, ...] = ()) -> list[AxisUse | None]:
    return [each.use for each in axes_of(LINE, owned, APART, wrappers)]


@pytest.mark.parametrize(
    "name",
    ["dp", "dp0", "dp_shard", "dp_replicate", "DP", "data", "data1", "fsdp", "hsdp", "shard"],
)
def test_names_of_data_axes_are_known(name: str) -> None:
    assert named_as(name) is AxisName.DATA


@pytest.mark.parametrize(
    "name",
    ["tp", "tp0", "TP", "cp", "cp1", "ep", "ep2", "pp", "sp", "pipe", "seq", "tensor", "expert_0"],
)
def test_names_of_axes_that_cut_no_batches_are_known_with_a_digit_behind_too(name: str) -> None:
    assert named_as(name) is AxisName.NOT_DATA


@pytest.mark.parametrize("name", ["dp_shard_cp", "dp_cp", "cp_dp0"])
def test_an_axis_named_after_both_is_no_data_axis(name: str) -> None:
    # ranks of it may well be handed one batch, of which each takes its part of the sequence
    assert named_as(name) is AxisName.NOT_DATA


@pytest.mark.parametrize("name", ["axis0", "x", "help", "step", "adept", "update"])
def test_a_word_inside_another_says_nothing(name: str) -> None:
    assert named_as(name) is AxisName.NOTHING


def test_lines_are_in_order_of_the_mesh_one_for_every_place_on_the_other_axes() -> None:
    mesh = Mesh(axes=("a", "b"), shape=(2, 3), ranks=(5, 1, 3, 0, 2, 4))
    assert lines_along(mesh, ["b"]) == [(5, 1, 3), (0, 2, 4)]
    assert lines_along(mesh, ["a"]) == [(5, 0), (1, 2), (3, 4)]
    assert lines_along(mesh, ["a", "b"]) == [mesh.ranks]


def test_equal_parameters_are_replicas_where_one_is_no_constant() -> None:
    same, other = {0: 1, 1: 1}, {0: 1, 1: 2}
    assert uses(plain(same)) == [AxisUse.REPLICAS]
    assert uses(plain(same, is_constant=True)) == [None]
    assert uses(plain(same), plain(other)) == [None]
    assert uses(plain(other), wrappers=("FSDP1",)) == [AxisUse.FSDP_SHARDS]


def test_shards_are_fsdp_s_where_every_parameter_is_cut_and_fsdp_is_around_a_module() -> None:
    cut, whole = placed(LINE, "Shard(0)"), placed(LINE, "Replicate()")
    assert uses(cut, wrappers=("FSDP2",)) == [AxisUse.FSDP_SHARDS]
    assert uses(cut) == [None]
    assert uses(cut, whole, wrappers=("FSDP2",)) == [None]
    assert uses(whole) == [AxisUse.REPLICAS]
    assert uses(placed(LINE, "Partial(sum)")) == [None]


def test_a_data_axis_is_one_along_which_root_inputs_differ_too() -> None:
    by_row = [{0: "a", 1: "a", 2: "b", 3: "b"}]
    whole = placed(GRID, "Replicate()", "Replicate()")
    found = {each.axis: each for each in axes_of(GRID, [whole], by_row, ())}
    assert found["dp"].is_data and not found["tp"].is_data
    found = {each.axis: each for each in axes_of(GRID, [whole], APART, ())}
    assert found["tp"].has_other_inputs and not found["tp"].is_data  # its name says so


def test_meshes_that_repeat_each_other_are_one_with_an_axis_in_front() -> None:
    rows = [Mesh(axes=("tp",), shape=(2,), ranks=ranks) for ranks in ((2, 3), (0, 1))]
    held = HeldParameter(
        placements={"tp": parse_placement("Shard(0)")}, meshes=rows, prints={}, is_constant=False
    )
    found = largest_mesh([plain({}), held], frozenset(range(4)))
    assert (found.axes, found.shape, found.ranks) == (("data", "tp"), (2, 2), (0, 1, 2, 3))
    assert largest_mesh([held], frozenset((1, 2))).axes == ("data",)


def test_an_axis_without_a_telling_name_is_fsdp_s_where_it_is_alone_and_cuts_everything() -> None:
    cut, whole = parse_placement("Shard(0)"), parse_placement("Replicate()")
    assert is_fsdp_axis("axis0", [cut, cut], 1)
    assert not is_fsdp_axis("axis0", [cut, whole], 1)
    assert not is_fsdp_axis("axis0", [cut], 2)
    assert is_fsdp_axis("dp_replicate", [whole], 2)
    assert not is_fsdp_axis("tp0", [cut], 1)
