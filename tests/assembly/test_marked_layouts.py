"""Layouts that frameworks marked: what stands in the tree of parameters that ranks recorded as
plain, and what `check` makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.errors import LayoutError
from rankscope.layout.layoutfile import LayoutMark
from rankscope.layout.placement import LayoutSource, Placement, PlacementKind
from rankscope.record.finding import Report
from rankscope.record.phases import Phase
from rankscope.tree.assembly import layouts as markedlayouts
from rankscope.tree.assembly.interning import mark_of
from tests.diagnosis.paper import PAIR, collective, judged, module, numbers, placed_on, setup
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


def write_marks(
    rank: PaperRank, marks: Marks, members: list[int] | None = None, **more: bool
) -> None:
    """Record the marks of some parameters, or with `activation` of slots: {path/slot: ...}."""
    for name, (axis, placement) in marks.items():
        path, _, own = name.rpartition("/" if more else ".")
        module = rank.known(
            "module", root=rank.root(), path=path, raw_path=path, wrappers=[], opaque=False,
            **{"class": "Linear"},
        )  # fmt: skip
        rank.define(
            "mark", module=module, name=own, axis=axis, placement=placement, members=members,
            **more,
        )  # fmt: skip


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


def entries(folder: Path, of: str = "setup") -> dict[str, list[dict[str, Any]]]:
    """{path:slot: entries} of what stands at setup, or in the steps; with the phase before it where
    that is not forward."""
    tree = read_valid(folder / "trace")
    found: dict[str, list[dict[str, Any]]] = {}
    waiting = [node for step in tree[of] for node in step["nodes"]]
    while waiting:
        node = waiting.pop()
        waiting += node["children"]
        phase = "" if node["phase"] in (of, "forward") else f"{node['phase']} "
        for entry in node["slots"]:
            found.setdefault(f"{phase}{node['path']}:{entry['slot']}", []).append(entry)
    return found


def layouts(folder: Path, of: str = "setup") -> dict[str, dict[str, Any]]:
    """{path:slot: layout} of the same, where all calls agree."""
    found = entries(folder, of)
    for each in found.values():
        assert all(entry["layout"] == each[0]["layout"] for entry in each)
    return {name: each[0]["layout"] for name, each in found.items()}


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
    mark = LayoutMark(axis="tp", placement=strided, members=members)
    assert mark_of(mark.as_fields()) == mark and mark.is_cut


def test_a_mark_with_an_unknown_placement_is_refused():
    with pytest.raises(LayoutError, match="not a placement"):
        mark_of({"axis": "tp", "placement": "Ragged(1)", "members": None})


# ---- activations ---------------------------------------------------------------------------------


UP: Marks = {"up/input.0": ("tp", WHOLE), "up/output": ("tp", "Shard(-1)")}
DOWN: Marks = {"down/input.0": ("tp", "Shard(-1)"), "down/output": ("tp", WHOLE)}
IN, INNER = numbers(1, 2, 3, 4), numbers(2, 2, 3, 6)


def own_part(rank: int, whole: np.ndarray = INNER) -> np.ndarray:
    half = whole.shape[-1] // 2
    return whole[..., rank % 2 * half :][..., :half]


def layers(rank: PaperRank, number: int = 0, *, forgets: bool = False) -> None:
    """One forward of a column-parallel layer and of a row-parallel one."""
    part, pair = own_part(rank.rank), pair_of(rank.rank)
    summand = numbers(20 + rank.rank % 2, 2, 3, 4)
    out = summand if forgets else numbers(20, 2, 3, 4) + numbers(21, 2, 3, 4)
    with rank.call(class_name="Model") as root:
        rank.value(root, "input.0", IN)
        module(rank, "up", IN, part)
        with rank.call("down", class_name="Linear") as call:
            rank.value(call, "input.0", part)
            if not forgets:
                facts = {"parent": call, "group": str(pair), "members": pair}
                collective(rank, "down", number, summand, out, **facts)
            rank.value(call, "output", out)


def activations(rank: PaperRank, marks: Marks = UP | DOWN) -> None:
    write_marks(rank, marks, pair_of(rank.rank), activation=True)


def test_activations_lie_as_their_marks_say_in_every_call(tmp_path):
    def write(rank: PaperRank) -> None:
        activations(rank)
        layers(rank)
        layers(rank, 1)

    report = judged(tmp_path, 4, write)
    assert report.findings == ()
    found = layouts(tmp_path, "steps")
    whole = PLACED | {"placements": {"tp": "Replicate()"}}
    cut = PLACED | {"placements": {"tp": "Shard(2)"}}  # the last dim of three
    assert found["up:input.0"] == found["down:output"] == whole
    assert found["up:output"] == found["down:input.0"] == cut
    # the collective inside has a slot of that name, which nobody marked
    assert found["collective down:input.0"] == UNKNOWN
    assert found[":input.0"] == UNKNOWN
    for entry in entries(tmp_path, "steps")["up:output"]:
        assert entry["shape"] == [2, 3, 6]
        assert [value["ranges"][2] for value in entry["values"]] == [[[0, 3]], [[3, 6]]]


def test_a_forgotten_reduction_behind_a_marked_layer_is_named_without_siblings(tmp_path):
    def write(rank: PaperRank, *, is_marked: bool) -> None:
        if is_marked:
            activations(rank)
        layers(rank, forgets=True)

    report = judged(tmp_path / "bare", 2, lambda rank: write(rank, is_marked=False))
    assert report.findings == ()
    report = judged(tmp_path / "marked", 2, lambda rank: write(rank, is_marked=True))
    (origin,) = report.origins
    assert (origin.path, origin.slot, origin.ranks) == ("down", "output", (0, 1))
    assert origin.kind.value == "replica-mismatch" and origin.evidence["layout"] == "marked"


def test_what_a_dtensor_or_shapes_say_of_an_activation_stands(tmp_path):
    def write(rank: PaperRank) -> None:
        activations(rank)
        with rank.call("up", class_name="Linear") as call:
            rank.value(call, "input.0", IN, **placed_on(PAIR, IN))
            rank.value(call, "output", INNER[:, rank.rank :])  # of other lengths in dim 1
        module(rank, "down", np.float32(3.0), np.float32(3.0))  # no dim to cut

    judged(tmp_path, 2, write)
    found = layouts(tmp_path, "steps")
    assert found["up:input.0"]["source"] == "dtensor"
    assert found["up:output"] == found["down:input.0"] == UNKNOWN
    assert found["down:output"]["source"] == "marked"


def test_a_rank_that_recorded_nothing_leaves_the_others_without_a_place(tmp_path):
    def write(rank: PaperRank) -> None:
        activations(rank)
        if rank.rank != 1:
            layers(rank)

    judged(tmp_path, 4, write)
    found = entries(tmp_path, "steps")
    assert [entry["layout"]["source"] for entry in found["up:output"]] == ["unknown", "marked"]
    assert [entry["layout"]["source"] for entry in found["up:input.0"]] == ["marked"]


def test_a_mark_of_a_parameter_called_output_says_nothing_of_the_output(tmp_path):
    def write(rank: PaperRank) -> None:
        write_marks(rank, {"up.output": ("tp", WHOLE)}, pair_of(rank.rank))
        setup(rank, {"up.output": ZEROS})
        layers(rank)

    judged(tmp_path, 2, write)
    assert layouts(tmp_path, "steps")["up:output"] == UNKNOWN
    assert layouts(tmp_path)["up:param:output"]["source"] == "marked"


def test_a_mark_whose_ranks_are_not_its_own_is_not_used(tmp_path):
    def write(rank: PaperRank) -> None:
        write_marks(rank, UP, [5, 6], activation=True)
        layers(rank)

    judged(tmp_path, 2, write)
    assert layouts(tmp_path, "steps")["up:output"] == UNKNOWN


def test_values_that_lie_alike_are_placed_once(tmp_path, monkeypatch):
    """However many layers and calls there are: one answer for each group of ranks and shape."""
    asked = []

    def counted(*given: Any) -> Any:
        asked.append(given)
        return declared_pieces(*given)

    declared_pieces = markedlayouts.declared_pieces
    monkeypatch.setattr(markedlayouts, "declared_pieces", counted)
    names = [f"layers.{number}.up" for number in range(5)]

    def write(rank: PaperRank) -> None:
        marks = {
            f"{name}/{slot}": UP[f"up/{slot}"] for name in names for slot in ("input.0", "output")
        }
        activations(rank, marks)
        for name in names * 3:
            module(rank, name, IN, own_part(rank.rank))

    judged(tmp_path, 4, write)
    assert len(asked) == 4  # two groups of two ranks, of each what goes in and what comes out
    found = entries(tmp_path, "steps")
    assert {e["layout"]["source"] for name in names for e in found[f"{name}:output"]} == {"marked"}
    assert len(found[f"{names[0]}:output"]) == 3


@pytest.mark.parametrize(("dims", "cut"), [(0, 0), (1, 0), (3, 2)])
def test_the_last_dim_is_the_last_of_as_many_as_there_are(dims, cut):
    fields = {"axis": "tp", "placement": "Shard(-1)", "members": [0, 1]}
    mark = mark_of(fields)
    assert mark.as_fields() == fields and mark.is_cut
    assert mark.placed(dims) == Placement(kind=PlacementKind.SHARD, dim=cut)
