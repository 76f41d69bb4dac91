"""Who are data-parallel peers: inferred where inputs and parameters both say so, else not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rankscope.layout.placement import Mesh
from rankscope.record.phases import Phase
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from rankscope.tree.tensors.proofs import Peers, find_peers
from tests.tree.jobs import GRID, piece
from tests.tree.ranks_on_paper import PaperRank

WEIGHT = np.arange(16, dtype=np.float32).reshape(4, 4)
INPUT = np.arange(8, dtype=np.float32).reshape(4, 2)
LINE = Mesh(axes=("dp",), shape=(4,), ranks=(0, 1, 2, 3))
Held = Callable[[int], np.ndarray]


def peers(
    folder: Path,
    *,
    weight: Held,
    x: Held,
    mesh: Callable[[int], Mesh | None] = lambda rank: None,
    placements: tuple[str, ...] = (),
    wrappers: tuple[str, ...] = (),
    declared: Mesh | None = None,
    path: Callable[[int], str] = lambda rank: "",
    ranks: range = range(4),
) -> Peers:
    """What is inferred of four ranks with one parameter and one root input each."""
    out = folder / "trace"
    for number in range(4):
        rank = PaperRank(folder / "spools", number, 4)
        how = {"class_name": "Net", "wrappers": list(wrappers)}
        with rank.call(path(number), phase=Phase.SETUP, micro_batch=None, **how) as event:
            rank.value(
                event, "param:weight", weight(number), phase=Phase.SETUP, mesh=mesh(number),
                placements=placements, whole=WEIGHT.shape if placements else None,
            )  # fmt: skip
        with rank.call(**how) as top:
            rank.value(top, "input.0", x(number))
        rank.end()
        rank.ship(out)
    build(out)
    setup = open_trace(out).setup[0]
    node = next(node for node in setup.walk() if node.path == path(ranks[0]))
    return find_peers(node, ranks, declared=declared)


def same(rank: int) -> np.ndarray:
    return WEIGHT


def own(rank: int) -> np.ndarray:
    return INPUT + rank


def by_row(rank: int) -> np.ndarray:
    return INPUT + rank // 2


def test_equal_parameters_and_other_inputs_are_data_parallel(tmp_path):
    found = peers(tmp_path, weight=same, x=own)
    assert (found.data, found.replicas, found.why_not) == (("data",), ("data",), "")
    assert found.mesh.ranks == (0, 1, 2, 3) and found.samples == dict.fromkeys(range(4), 4)


def test_the_ranks_of_a_pipeline_stage_have_axes_of_their_own(tmp_path):
    found = peers(
        tmp_path, weight=lambda rank: WEIGHT + rank // 2, x=own, ranks=range(3, 4),
        path=lambda rank: f"layers.{rank // 2}",
    )  # fmt: skip
    assert (found.data, found.mesh.ranks) == (("data",), (2, 3))


def test_fsdp_shards_are_data_parallel_and_tensor_parallel_ones_are_not(tmp_path):
    how = {
        "weight": lambda rank: WEIGHT[rank : rank + 1], "mesh": lambda rank: LINE,
        "placements": ("Shard(0)",),
    }  # fmt: skip
    found = peers(tmp_path / "fsdp", x=own, wrappers=("FSDP2",), **how)
    assert (found.data, found.replicas) == (("dp",), ())
    assert "FSDP shards" in found.reason
    found = peers(tmp_path / "cut", x=own, **how)
    assert found.data == () and "neither replicas nor FSDP shards" in found.why_not


def test_axes_are_told_apart_on_a_mesh_and_rows_that_repeat_it_are_one_more(tmp_path):
    def rows(rank: int) -> Mesh:
        first = rank // 2 * 2
        return Mesh(axes=("tp",), shape=(2,), ranks=(first, first + 1))

    placements = ("StridedShard(0, split_factor=2)", "Shard(0)")
    found = peers(
        tmp_path / "fsdp x tp", x=by_row, wrappers=("FSDP2",), mesh=lambda rank: GRID,
        weight=lambda rank: piece(rank, WEIGHT, GRID, list(placements)), placements=placements,
    )  # fmt: skip
    assert (found.mesh.axes, found.data, found.replicas) == (("dp", "tp"), ("dp",), ())
    found = peers(
        tmp_path / "ddp x tp", x=by_row, mesh=rows, placements=("Shard(0)",),
        weight=lambda rank: WEIGHT[rank % 2 * 2 : rank % 2 * 2 + 2],
    )  # fmt: skip
    assert (found.mesh.axes, found.mesh.shape) == (("data", "tp"), (2, 2))
    assert (found.data, found.replicas) == (("data",), ("data",))


@pytest.mark.parametrize(
    ("weight", "x", "said"),
    [
        (same, lambda rank: INPUT, "were handed the same inputs"),
        (lambda rank: WEIGHT + rank, own, "neither replicas nor FSDP shards"),
        (lambda rank: np.ones((4, 4), np.float32), own, "neither replicas nor FSDP shards"),
    ],
    ids=["tensor parallel", "other parameters", "constants"],
)
def test_what_does_not_prove_it_is_not_taken_for_it(tmp_path, weight, x, said):
    found = peers(tmp_path, weight=weight, x=x)
    assert found.data == () and said in found.why_not


def test_an_axis_that_cuts_sequences_by_its_name_is_not_taken_for_data(tmp_path):
    declared = Mesh(axes=("dp_shard_cp",), shape=(4,), ranks=(0, 1, 2, 3))
    found = peers(tmp_path / "cp", weight=same, x=own, declared=declared)
    assert found.data == () and "along dp_shard_cp, whose name says" in found.why_not
    assert found.replicas == ("dp_shard_cp",)
    declared = Mesh(axes=("cp1",), shape=(4,), ranks=(0, 1, 2, 3))
    found = peers(tmp_path / "cp1", weight=same, x=own, declared=declared)
    assert found.data == () and "along cp1, whose name says" in found.why_not
    declared = Mesh(axes=("replicate", "dp"), shape=(2, 2), ranks=(0, 1, 2, 3))
    assert peers(tmp_path / "dp", weight=same, x=own, declared=declared).data == (
        "replicate",
        "dp",
    )
