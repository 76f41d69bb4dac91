"""Layouts given at trace time: what stands in the tree of values that ranks recorded as plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.layout.placement import LayoutSource, Mesh
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.tree.jobs import read_valid
from tests.tree.ranks_on_paper import PaperRank

LAYOUT = """
axes = "dp=2,tp=2"
[[layout]]
path = "up"
slot = "output"
placements = { tp = "Shard(1)" }
[[layout]]
path = "norm"
slot = "output"
placements = { dp = "Shard(0)", tp = "Replicate()" }
"""
WHOLE = np.arange(60, dtype=np.float32).reshape(2, 6, 5)
"""[dp, rows, columns]; ranks of a tp row hold 3 and 2 columns."""
CUT = [slice(0, 3), slice(3, 5)]


def job(
    folder: Path,
    layout: str = LAYOUT,
    *,
    world: int = 4,
    given: tuple[int, ...] = (0, 1, 2, 3),
    placed: bool = False,
) -> Trace:
    """Ranks cut a value by hand along tp, unevenly, and hold replicas of another."""
    for number in range(world):
        rank = PaperRank(folder / "spools", number, world)
        if number in given:
            half = len(layout) // 2  # in pieces, as a large file is
            rank.define("layout", file="/x/layout.toml", text=layout[:half])
            rank.define("layout", file="/x/layout.toml", text=layout[half:])
        dp, tp = divmod(number, 2)
        with rank.call("up") as sequence:
            if placed:
                mesh = Mesh(axes=("tp",), shape=(world,), ranks=tuple(range(world)))
                rank.value(
                    sequence, "output", WHOLE[0], mesh=mesh, placements=["Replicate()"],
                    whole=WHOLE[0].shape,
                )  # fmt: skip
            else:
                rank.value(sequence, "output", WHOLE[dp][:, CUT[tp]])
        with rank.call("norm") as sequence:
            rank.value(sequence, "output", WHOLE[dp])
            rank.value(sequence, "output.scale", None, dtype="python", note="2.0")
        rank.end()
        rank.ship(folder / "trace")
    build(folder / "trace")
    return open_trace(folder / "trace")


def slot_of(folder: Path, path: str, slot: str = "output") -> list[dict[str, Any]]:
    nodes = read_valid(folder / "trace")["steps"][0]["nodes"]
    (node,) = [node for node in nodes if node["path"] == path]
    return [entry for entry in node["slots"] if entry["slot"] == slot]


def test_plain_shards_get_placements_and_ranges_from_rank_order_and_local_sizes(tmp_path):
    trace = job(tmp_path)
    (entry,) = slot_of(tmp_path, "up")
    assert entry["layout"] == {
        "source": "declared",
        "mesh": "declared:tp=2",
        "placements": {"tp": "Shard(1)"},
    }
    assert entry["shape"] == [6, 5] and "disagree" not in entry
    assert {v["ranks"]: v["ranges"] for v in entry["values"]} == {
        "0": [[[0, 6]], [[0, 3]]], "1": [[[0, 6]], [[3, 5]]],
        "2": [[[0, 6]], [[0, 3]]], "3": [[[0, 6]], [[3, 5]]],
    }  # fmt: skip
    meshes = {mesh["name"]: mesh["over"] for mesh in trace.run["meshes"]}
    assert meshes == {"declared:tp=2": [[0, 1], [2, 3]], "declared:dp=2,tp=2": [[0, 1, 2, 3]]}
    assert trace.run["layout"] == {"file": "/x/layout.toml", "text": LAYOUT}
    value = trace.value("up", "output")
    assert value.layout.source is LayoutSource.DECLARED
    assert value.layout.mesh is not None and value.layout.mesh.ranks == (0, 1)
    assert value.views[0].ranges(3) == (((0, 6),), ((3, 5),))
    (python,) = slot_of(tmp_path, "norm", "output.scale")
    assert python["layout"] == {"source": "unknown"}


def test_statistics_of_the_whole_are_known_and_its_sketch_is_not(tmp_path):
    job(tmp_path)
    (entry,) = slot_of(tmp_path, "up")
    assert [each["ranks"] for each in entry["combined"]] == ["0-1", "2-3"]
    for each, whole in zip(entry["combined"], WHOLE):
        assert each["digest"]["count"] == 30
        assert each["digest"]["mean"] == pytest.approx(float(whole.mean()))
        assert each["digest"]["max"] == float(whole.max())
        assert each["digest"]["sketch"] is None and "no offsets were recorded" in each["note"]
    (entry,) = slot_of(tmp_path, "norm")
    (each,) = entry["combined"]
    assert entry["shape"] == [12, 5] and each["digest"]["count"] == 60
    assert each["digest"]["sketch"] is None


def test_what_a_dtensor_says_stands(tmp_path):
    job(tmp_path, placed=True)
    (entry,) = slot_of(tmp_path, "up")
    assert entry["layout"]["source"] == "dtensor"


@pytest.mark.parametrize(
    ("layout", "world", "said"),
    [
        (LAYOUT.replace("tp=2", "tp=4"), 4, "axes dp=2,tp=4 are those of 8 ranks, the run had 4"),
        (LAYOUT.replace("Shard(1)", "Shard(0)"), 4, "up:output does not lie as declared"),
        (LAYOUT.replace("Shard(1)", "Shard(7)"), 4, "Shard(7) cannot cut a value of 2 dims"),
        (LAYOUT + LAYOUT.split("\n", 2)[2].replace("Shard(1)", "Replicate()"), 4, "different plac"),
        ("axes = 7", 4, 'write axes = "dp=1,tp=2"'),
    ],
    ids=["other size", "other dim", "no such dim", "contradiction", "no axes"],
)
def test_what_cannot_be_applied_stays_unknown_and_is_said(tmp_path, layout, world, said):
    trace = job(tmp_path, layout, world=world)
    (entry,) = slot_of(tmp_path, "up")
    assert entry["layout"] == {"source": "unknown"}
    assert any(said in note for note in trace.run["layout"]["notes"]), trace.run["layout"]


def test_a_rank_that_was_given_another_file_is_named_and_one_rank_alone_holds_everything(tmp_path):
    trace = job(tmp_path / "some", given=(0, 1, 2))
    assert trace.run["layout"]["notes"] == ["ranks 3 were given another layout file, or none"]
    trace = job(tmp_path / "one", world=1)
    assert "notes" not in trace.run["layout"] and trace.run["meshes"] == []


def test_a_trace_without_values_takes_a_layout_file_too(tmp_path):
    for number in range(4):
        rank = PaperRank(tmp_path / "spools", number, 4)
        rank.define("layout", file="layout.toml", text=LAYOUT)
        rank.end()
        rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    assert read_valid(tmp_path / "trace")["run"]["layout"]["text"] == LAYOUT
