"""The ranks other tests run on."""

from __future__ import annotations

import os
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
from tests.torches import KEEPS_GROUPS


def gathers(value: int) -> list[int]:
    out: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value + dist.get_rank())
    return out  # type: ignore[return-value]


def reads(name: str) -> tuple[str | None, str | None]:
    return os.environ.get(name), os.environ.get("RANK")


def fails_on(rank: int) -> torch.Tensor:
    print("about to fail")
    if dist.get_rank() == rank:
        raise ValueError("as asked")
    return torch.ones(2)


def leaves(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


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


def test_every_rank_returns_its_result_in_a_group_of_the_asked_size(ranks: RankPool):
    assert ranks.run(gathers, 10, world_size=3) == [[10, 11, 12]] * 3
    assert ranks.run(gathers, 0, world_size=2) == [[0, 1]] * 2


def test_the_environment_lasts_for_one_call(ranks: RankPool):
    assert ranks.run(reads, "SOME_NAME", world_size=2, env={"SOME_NAME": "x"}) == [
        ("x", "0"),
        ("x", "1"),
    ]
    assert ranks.run(reads, "SOME_NAME", world_size=2) == [(None, "0"), (None, "1")]


def test_a_failing_rank_shows_its_traceback_and_what_it_printed(ranks: RankPool):
    with pytest.raises(RankFailure, match=r"(?s)rank 1:.*ValueError: as asked.*about to fail"):
        ranks.run(fails_on, 1, world_size=2)


def test_a_rank_that_dies_is_named_and_replaced(ranks: RankPool):
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        ranks.run(leaves, 1, world_size=2)
    assert ranks.run(gathers, 1, world_size=2) == [[1, 2]] * 2


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
