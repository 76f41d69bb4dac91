"""Shards that hold the same on every rank: drawn or loaded alike, where each should be a part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import rankscope
from rankscope.record.finding import Finding, Severity
from tests.diagnosis.paper import EVENT, PAIR, Phase, judged, numbers, told
from tests.diagnosis.traced import report_of
from tests.distributed.pool import RankPool
from tests.tree.ranks_on_paper import PaperRank

Shards = Mapping[str, tuple[np.ndarray, np.ndarray]]


def findings(folder: Path, shards: Shards) -> list[Finding]:
    """Check a setup of parameters cut along dim 0: what each of the two ranks holds of them."""

    def write(rank: PaperRank) -> None:
        where = {"phase": Phase.SETUP, "step": 0, "ordinal": 0, **EVENT}
        with rank.call(class_name="Model", **where):
            for path, held in shards.items():
                own = held[rank.rank]
                with rank.call(path, class_name="Linear", **where) as owner:
                    rank.value(
                        owner, "param:weight", own, phase=Phase.SETUP, mesh=PAIR,
                        placements=["Shard(0)"], whole=(2 * own.shape[0], *own.shape[1:]),
                    )  # fmt: skip

    return list(judged(folder, 2, write).findings)


def apart(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    return numbers(2 * seed, *shape), numbers(2 * seed + 1, *shape)


def alike(seed: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    return numbers(seed, *shape), numbers(seed, *shape)


def test_random_numbers_that_are_the_same_in_every_shard_are_a_fault(tmp_path: Path):
    (found,) = findings(tmp_path, {"fc": alike(1), "other": apart(2), "third": apart(3)})
    assert told(found) == ("duplicate-data", "setup", "fc", "param:weight", (0, 1))
    assert found.severity is Severity.FAULT
    assert "distribute_tensor" in found.advice


def test_constants_and_patterns_that_repeat_on_purpose_are_none(tmp_path: Path):
    decay = np.log(np.tile(np.arange(1, 7, dtype=np.float32), (4, 1)))  # one row for all channels
    ones = np.ones((4, 6), np.float32)
    right = {"decay": (decay, decay), "norm": (ones, ones), "fc": apart(1), "out": apart(2)}
    assert findings(tmp_path, right) == []


def test_experts_that_begin_as_copies_of_one_are_a_warning_at_most(tmp_path: Path):
    (found,) = findings(tmp_path, {"experts": alike(1, 2, 4, 6), "fc": apart(2), "out": apart(3)})
    assert found.severity is Severity.WARNING


def test_a_file_of_which_every_rank_loaded_the_same_part_is_a_fault_though_its_mean_is_not_zero(
    tmp_path: Path,
):
    loaded = {name: (numbers(n) + 3, numbers(n) + 3) for n, name in enumerate(("fc", "out"))}
    assert [each.path for each in findings(tmp_path, loaded)] == ["fc", "out"]


def drawn(each_alike: bool, out: str) -> None:
    """Ranks hold a part of a weight each, three unlike ones; each drew its part from one seed."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU())
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    whole = torch.randn(8, 6)
    with torch.no_grad():
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        size = len(whole.chunk(world)[rank])  # the generators of all ranks stand at the same place
        local = torch.randn(4, 6)[:size]
        if each_alike:
            whole_form = {"shape": whole.shape, "stride": whole.stride()}
            weight.copy_(DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **whole_form))
        else:
            weight.copy_(distribute_tensor(whole, mesh, [Shard(0)]))
    with rankscope.trace(model, out=out):
        model(torch.ones(2, 6)).sum().backward()


def test_all_that_ranks_drew_from_one_seed_on_cpus_is_one_warning(ranks: RankPool, tmp_path: Path):
    (found,) = report_of(ranks, drawn, True, folder=tmp_path / "wrong").findings
    assert told(found) == ("duplicate-data", "setup", "0", "param:weight", (0, 1))
    assert found.severity is Severity.WARNING
    assert "a mesh of CPUs" in found.message
    (uneven,) = report_of(ranks, drawn, True, folder=tmp_path / "uneven", world=3).findings
    assert told(uneven) == ("duplicate-data", "setup", "0", "param:weight", (0, 1))
    assert not report_of(ranks, drawn, False, folder=tmp_path / "right").findings
