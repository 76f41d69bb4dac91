"""Layouts that frameworks marked: what stands in the tree of parameters that ranks recorded as
plain, and what `check` makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.assembly.interning import mark_of
from rankscope.errors import LayoutError
from rankscope.layout.marks import ParameterMark
from rankscope.layout.placement import LayoutSource, Placement, PlacementKind
from rankscope.record.finding import Report
from rankscope.record.phases import Phase
from tests.diagnosis.paper import collective, judged, numbers, setup
from tests.diagnosis.paper import event as recorded
from tests.tree.jobs import read_valid
from tests.tree.ranks_on_paper import PaperRank

WIDE = numbers(1, 4, 6)
ZEROS = np.zeros(4, np.float32)
SHARD, WHOLE = "Shard(0)", "Replicate()"
Marks = Mapping[str, tuple[str, str]]
"""{path.name: (axis, placement)}"""


def parameters(rank: int) -> dict[str, np.ndarray]:
    """A weight cut in pairs of ranks, repeated over pairs; a bias that begins as zeros."""
    return {"up.weight": WIDE[rank % 2 * 2 :][:2], "down.bias": ZEROS}


MARKS: Marks = {"up.weight": ("tp", SHARD), "down.bias": ("tp", WHOLE)}


def write_marks(rank: PaperRank, marks: Marks, members: list[int] | None = None) -> None:
    """Record the marks of some parameters."""
    for name, (axis, placement) in marks.items():
        path, _, own = name.rpartition(".")
        module = rank.known(
            "module", root=rank.root(), path=path, raw_path=path, wrappers=[], opaque=False,
            **{"class": "Linear"},
        )  # fmt: skip
        rank.define(
            "mark", module=module, name=own, axis=axis, placement=placement, members=members
        )


def pair_of(rank: int) -> list[int]:
    return [rank // 2 * 2, rank // 2 * 2 + 1]


def job(
    folder: Path,
    groups: Callable[[PaperRank], None] = lambda rank: None,
    marks: Marks = MARKS,
    own: Callable[[int], dict[str, np.ndarray]] = parameters,
    gradient: Callable[[int], np.ndarray] = lambda rank: numbers(7, 4),
    members: Callable[[int], list[int] | None] = lambda rank: None,
) -> Report:
    """Four ranks that begin with marked parameters and step with one gradient of the bias."""

    def write(rank: PaperRank) -> None:
        write_marks(rank, marks, members(rank.rank))
        setup(rank, own(rank.rank))
        groups(rank)
        recorded(rank, Phase.GRADS, "grad", {"down.bias": gradient(rank.rank)})

    return judged(folder, 4, write)


def inside(rank: PaperRank, members: list[int] | None = None, path: str = "up") -> None:
    """An all-reduce inside the cut layer."""
    with rank.call(path, class_name="Linear") as call:
        own = members or pair_of(rank.rank)
        collective(rank, path, 0, WIDE, WIDE, parent=call, group=str(own), members=own)


def described(rank: PaperRank, description: str = "TENSOR_MODEL_PARALLEL_GROUP") -> None:
    own = pair_of(rank.rank)
    rank.define("group", name=str(own), ranks=own, backend="gloo", description=description)


def layouts(folder: Path) -> dict[str, dict[str, Any]]:
    """{path:slot: layout} of what stands at setup."""
    tree = read_valid(folder / "trace")
    found = {}
    waiting = list(tree["setup"][0]["nodes"])
    while waiting:
        node = waiting.pop()
        waiting += node["children"]
        for entry in node["slots"]:
            found[f"{node['path']}:{entry['slot']}"] = entry["layout"]
    return found


PLACED = {
    "source": LayoutSource.MARKED.value,
    "mesh": "marked:tp=2",
    "placements": {"tp": "Shard(0)"},
}
UNKNOWN = {"source": "unknown"}


def test_a_group_that_the_framework_describes_is_the_axis(tmp_path):
    job(tmp_path, described)
    found = layouts(tmp_path)
    assert found["up:param:weight"] == PLACED
    assert found["down:param:bias"] == PLACED | {"placements": {"tp": "Replicate()"}}
    meshes = read_valid(tmp_path / "trace")["run"]["meshes"]
    assert meshes[0]["over"] == [[0, 1], [2, 3]] and meshes[0]["name"] == "marked:tp=2"


def test_a_group_that_the_module_names_is_the_axis(tmp_path):
    job(tmp_path, members=pair_of)
    assert layouts(tmp_path)["up:param:weight"] == PLACED


def test_the_group_of_collectives_inside_a_cut_layer_is_the_axis(tmp_path):
    job(tmp_path, inside)
    assert layouts(tmp_path)["up:param:weight"] == PLACED


def test_a_group_of_data_parallel_ranks_is_never_taken_for_the_axis(tmp_path):
    job(tmp_path, lambda rank: inside(rank, [rank.rank % 2, rank.rank % 2 + 2]))
    assert layouts(tmp_path)["up:param:weight"] == UNKNOWN


def test_without_a_group_nothing_is_guessed(tmp_path):
    job(tmp_path)
    assert set(map(str, layouts(tmp_path).values())) == {str(UNKNOWN)}


def test_collectives_elsewhere_do_not_tell_the_axis(tmp_path):
    job(tmp_path, lambda rank: inside(rank, path="down"))
    assert layouts(tmp_path)["up:param:weight"] == UNKNOWN


def test_ranks_whose_marks_contradict_each_other_keep_what_they_recorded(tmp_path):
    def write(rank: PaperRank) -> None:
        write_marks(rank, {"up.weight": ("tp", SHARD if rank.rank else WHOLE)})
        setup(rank, parameters(rank.rank))
        described(rank)

    judged(tmp_path, 2, write)
    assert layouts(tmp_path)["up:param:weight"] == UNKNOWN


def test_a_mark_that_local_shapes_contradict_is_not_used(tmp_path):
    def ragged(rank: int) -> dict[str, np.ndarray]:
        return {"up.weight": numbers(1, 2, 6 - rank % 2)}

    job(tmp_path, described, {"up.weight": ("tp", SHARD)}, ragged)
    tree = read_valid(tmp_path / "trace")
    assert "marked" not in str(tree)


def test_a_strided_shard_lies_in_blocks(tmp_path):
    job(tmp_path, described, {"up.weight": ("tp", "StridedShard(0, split_factor=2)")})
    node = read_valid(tmp_path / "trace")["setup"][0]["nodes"][0]["children"]
    (entry,) = [slot for each in node for slot in each["slots"] if slot["slot"] == "param:weight"]
    assert [value["ranges"][0] for value in entry["values"]] == [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]


def test_a_constant_that_is_marked_whole_is_a_replica_and_one_without_a_mark_is_not(tmp_path):
    def own(rank: int) -> np.ndarray:
        return numbers(7 + rank % 2, 4)

    report = job(tmp_path / "marked", described, gradient=own)
    assert [(f.path, f.slot, f.ranks) for f in report.findings] == [
        ("down", "grad:bias", (0, 1, 2, 3))
    ]
    assert report.findings[0].evidence["layout"] == "marked"
    report = job(tmp_path / "bare", described, {"up.weight": ("tp", SHARD)}, gradient=own)
    assert report.findings == ()


def test_a_constant_that_is_marked_cut_may_have_other_gradients_on_each_rank(tmp_path):
    marks = MARKS | {"down.bias": ("tp", SHARD)}
    report = job(tmp_path, described, marks, gradient=lambda rank: numbers(7 + rank % 2, 4))
    assert report.findings == ()


def test_pieces_that_began_equal_at_one_place_of_several_groups_are_replicas(tmp_path):
    def write(rank: PaperRank) -> None:
        write_marks(rank, MARKS)
        setup(rank, parameters(rank.rank))
        described(rank)
        own = numbers(3 + rank.rank, 2, 6)
        recorded(rank, Phase.GRADS, "grad", {"up.weight": own})

    report = judged(tmp_path, 4, write)
    assert {(f.path, f.slot, f.ranks) for f in report.findings} == {
        ("up", "grad:weight", (0, 1, 2, 3))
    }
    assert report.findings[0].evidence["layout"] == "inferred"


@pytest.mark.parametrize("members", [None, (3, 1)])
def test_a_mark_reads_back_as_it_was_written(members):
    strided = Placement(kind=PlacementKind.STRIDED_SHARD, dim=0, split_factor=2)
    mark = ParameterMark(axis="tp", placement=strided, members=members)
    assert mark_of(mark.as_fields()) == mark and mark.is_cut


def test_a_mark_with_an_unknown_placement_is_refused():
    with pytest.raises(LayoutError, match="no placement"):
        mark_of({"axis": "tp", "placement": "Ragged(1)", "members": None})
