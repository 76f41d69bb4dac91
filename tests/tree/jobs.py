"""Small jobs on paper that several tests read."""

from __future__ import annotations

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from rankscope.layout.placement import Mesh, global_ranges, parse_placement
from rankscope.record.phases import Phase
from rankscope.spool.recordformat import StepEvent
from tests.tree.ranks_on_paper import PaperRank, take

GRID = Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))
WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6) - 11.5
NONE = {"micro_batch": None}


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    """Checks documents against the schema in the package."""
    text = (resources.files("rankscope.tree") / "trace.schema.json").read_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    return jsonschema.Draft202012Validator(json.loads(text))


def read_valid(out: Path) -> dict[str, Any]:
    """Read trace.json and tree.json, each checked against the schema: the latter, with `storage` of
    the former."""
    trace, tree = (json.loads((out / name).read_text()) for name in ("trace.json", "tree.json"))
    for each in (trace, tree):
        validator().validate(each)
    for name in ("run", "completeness"):
        assert trace[name] == tree[name]
    heads = [
        [{key: each[key] for key in each if key not in ("file", "rows", "nodes")} for each in steps]
        for steps in (trace["setup"], trace["steps"], tree["setup"], tree["steps"])
    ]
    assert heads[:2] == heads[2:]
    return {**tree, "storage": trace["storage"]}


def piece(rank: int, whole: np.ndarray, mesh: Mesh, placements: list[str]) -> np.ndarray:
    """What a rank of the mesh holds of a tensor."""
    at = mesh.coordinate(rank)
    assert at is not None
    return take(
        whole, global_ranges(whole.shape, mesh.shape, at, [parse_placement(p) for p in placements])
    )


def grid_job(folder: Path, out: Path, *, steps: int = 1, world: int = 4) -> list[PaperRank]:
    """Four ranks on a 2x2 mesh: a replicated-sharded weight, a sharded activation, gradients;
    shipped to `out`."""
    ranks = []
    placements = ["Replicate()", "Shard(1)"]
    for number in range(world):
        rank = PaperRank(folder, number, world, host=f"h{number // 2}")
        ranks.append(rank)
        with rank.call(class_name="Model", phase=Phase.SETUP, **NONE) as event:
            with rank.call("fc", class_name="Linear", phase=Phase.SETUP, **NONE) as owner:
                rank.value(
                    owner,
                    "param:weight",
                    piece(number, WEIGHT, GRID, placements),
                    phase=Phase.SETUP,
                    mesh=GRID,
                    placements=placements,
                    whole=WEIGHT.shape,
                    requires_grad=True,
                )
            del event
        for step in range(steps):
            rank.step(StepEvent.BEGIN, step)
            with rank.call(class_name="Model", step=step) as top:
                rank.value(top, "input.0", WEIGHT[:2] + number // 2, samples=True)
                with rank.call(
                    "fc",
                    class_name="Linear",
                    step=step,
                    raw_path="_orig_mod.fc",
                    wrappers=["FSDP2"],
                ) as fc:
                    rank.value(
                        fc,
                        "output",
                        piece(number, WEIGHT * 2, GRID, placements),
                        mesh=GRID,
                        placements=placements,
                        whole=WEIGHT.shape,
                    )
                rank.value(top, "output", np.float32(step + 1).reshape(()))
            rank.value(top, "grad_output.0", np.ones((), np.float32), phase=Phase.BACKWARD)
            rank.value(fc, "grad_output.0", WEIGHT, phase=Phase.BACKWARD)
            rank.step(StepEvent.END, step)
        rank.end()
        rank.ship(out)
    return ranks
