"""The ranks other tests run on: what becomes of those that hang, and of groups of earlier calls."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.pool import RankFailure, RankPool
from tests.distributed.test_pool import gathers
from tests.torches import KEEPS_GROUPS


def gathers_shards(groups_before: int) -> list[float]:
    """The more groups there are, the later the names of those of the mesh."""
    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    cut = distribute_tensor(torch.arange(4.0), mesh["dp"], [Shard(0)], src_data_rank=None)
    return (cut.detach() * 2).full_tensor().tolist()  # type: ignore[no-any-return]


def sleeps() -> int:
    time.sleep(60)
    return 0


def test_ranks_that_hang_are_killed_and_replaced(ranks: RankPool):
    with pytest.raises(RankFailure, match="did not come back"):
        ranks.run(sleeps, world_size=2, timeout_s=0.5)
    assert ranks.run(gathers, 1, world_size=2) == [[1, 2]] * 2


def test_a_mesh_has_the_groups_of_its_own_call_not_those_of_an_equal_mesh_before_it(
    ranks: RankPool,
):
    for groups_before in (3, 0, 5):
        found = ranks.run(gathers_shards, groups_before, world_size=2)
        assert found == [[0.0, 2.0, 4.0, 6.0]] * 2


def shards_a_model(width: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Linear(width, width)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, width)).sum().backward()
    weight = distribute_tensor(torch.ones(width, width), mesh, [Shard(0)]).requires_grad_()
    one = distribute_tensor(torch.ones(width, width), mesh, [Replicate()])
    (one @ weight.t()).sum().backward()


def threads() -> int:
    """Count this process's threads. Those of gloo's groups wake a hundred times a second each."""
    return len([*Path("/proc/self/task").iterdir()])


@pytest.mark.xfail(KEEPS_GROUPS, reason="torch 2.11 and 2.12 keep meshes", strict=True)
def test_groups_of_earlier_calls_leave_no_thread_behind(ranks: RankPool):
    """Each call has a shape of its own: torch keeps what it has learnt of a shape, mesh and all."""
    counts = []
    for width in (4, 6, 8):
        ranks.run(shards_a_model, width, world_size=2)
        counts.append(ranks.run(threads, world_size=2))
    assert counts[2] == counts[0]
