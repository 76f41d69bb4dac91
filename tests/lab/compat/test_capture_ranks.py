"""Captures of models that lie across ranks: what is recorded is what the module returned there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.compat.capturing import Side, hidden, make, ours, theirs
from tests.compat.peer import needs_transformers
from tests.distributed.pool import RankPool

ASKED = {"output_hidden_states": True, "output_ups": True}


class Block(nn.Module):
    """A column-parallel and a row-parallel linear layer, as a model author writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden).relu())


def _blocks(side: Side) -> nn.Module:
    recorder = side.OutputRecorder(nn.Linear, layer_name="up")
    records = {"hidden_states": Block, "ups": recorder}
    return make(side, records=records, layers=lambda: [Block(), Block()])


def tensor_parallel(side_name: str, compiles: bool) -> dict[str, Any]:
    side = ours() if side_name == "ours" else theirs()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole, model = _blocks(ours()), _blocks(side)
    for block in model.layers:
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
    expected, found = whole(hidden(), **ASKED), run(hidden(), **ASKED)
    recorded = [*found["hidden_states"][1:], *found["ups"]]
    wanted = [*expected["hidden_states"][1:], *expected["ups"]]
    sum(value.to_local().sum() for value in recorded).backward()
    return {
        "kinds": [type(value).__name__ for value in recorded],
        "placements": [str(value.placements) for value in recorded],
        "local": [tuple(value.to_local().shape) for value in recorded],
        "equal": [
            torch.allclose(value.full_tensor(), want) for value, want in zip(recorded, wanted)
        ],
        "grads": all(p.grad is not None for p in model.parameters()),
        "hooks": sum(len(m._forward_hooks) for m in model.modules()),
    }


def test_captured_dtensors_stay_dtensors(ranks: RankPool) -> None:
    for compiles in (False, True):
        for found in ranks.run(tensor_parallel, "ours", compiles, world_size=2):
            assert found["kinds"] == ["DTensor"] * 4
            assert found["placements"][:2] == ["(Shard(dim=0),)"] * 2
            assert found["placements"][2:] == ["(Shard(dim=1),)"] * 2
            assert found["local"] == [(1, 4), (1, 4), (2, 4), (2, 4)]
            assert found["equal"] == [True] * 4 and found["grads"]


@needs_transformers
@pytest.mark.parity
def test_the_same_dtensors_are_recorded_as_by_transformers(ranks: RankPool) -> None:
    for found, expected in zip(
        ranks.run(tensor_parallel, "ours", False, world_size=2),
        ranks.run(tensor_parallel, "theirs", False, world_size=2),
    ):
        for name in ("kinds", "placements", "local", "equal", "grads"):
            assert found[name] == expected[name], name


def test_only_the_hooks_of_the_parallel_plan_remain(ranks: RankPool) -> None:
    for found in ranks.run(tensor_parallel, "ours", False, world_size=2):
        assert found["hooks"] == 4  # one for the output of each linear layer, from torch


def sharded(side_name: str) -> tuple[str, int, bool]:
    side = ours() if side_name == "ours" else theirs()
    model, whole = _blocks(side), _blocks(ours())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = hidden(4)[dist.get_rank() :: 2]
    found, expected = model(rows, **ASKED), whole(rows, **ASKED)
    states = found.get("hidden_states") or ()
    equal = all(torch.allclose(a, b) for a, b in zip(states, expected["hidden_states"]))
    return (
        type(model).__name__,
        len(states),
        equal and not any(isinstance(state, DTensor) for state in states),
    )


def test_a_model_under_fsdp2_is_captured_although_its_class_was_renamed(ranks: RankPool) -> None:
    assert ranks.run(sharded, "ours", world_size=2) == [("FSDPModel", 3, True)] * 2


@needs_transformers
@pytest.mark.parity
def test_transformers_records_nothing_of_a_model_under_fsdp2(ranks: RankPool) -> None:
    assert [count for _, count, _ in ranks.run(sharded, "theirs", world_size=2)] == [0, 0]
