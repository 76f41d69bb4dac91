"""FSDP1 with `use_orig_params=True`: parameters that are runs of a flat one, and their replicas."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import rankscope
from rankscope.diagnosis.check import check
from rankscope.layout.placement import LayoutSource
from rankscope.record.finding import Verdict
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
from rankscope.tree.slotview import SlotView
from rankscope.tree.views import Trace
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool


def job(strategy: str, is_faulty: bool, out: str) -> None:
    """Two steps of a small model; the fault doubles the gradients of one row of replicas."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))
    shape, names = (2, dist.get_world_size() // 2), ("rows", "parts")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if "HYBRID" in strategy else None
    wrapped = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh,
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            data = torch.randn(
                4, 6, generator=torch.Generator().manual_seed(step + dist.get_rank())
            )
            wrapped(data).square().mean().backward()
            if is_faulty and dist.get_rank() >= 2:
                for parameter in wrapped.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(2)
            optimizer.step()
            optimizer.zero_grad()


def weights(trace: Trace) -> list[SlotView]:
    nodes = [node for step in trace.setup for node in step.walk()]
    return [view for node in nodes for view in node.slots if view.slot == "param:weight"]


def test_each_parameter_is_a_flat_tensor_in_runs(ranks: RankPool, tmp_path: Path) -> None:
    trace = open_trace(traced(ranks, job, "FULL_SHARD", False, folder=tmp_path, world=2))
    found = weights(trace)
    assert {view.source for view in found} == {LayoutSource.MARKED}
    assert {view.global_shape for view in found} == {(42,), (21,)}
    assert check(trace).verdict is Verdict.CLEAN


def test_what_is_not_cut_is_not_marked(ranks: RankPool, tmp_path: Path) -> None:
    trace = open_trace(traced(ranks, job, "NO_SHARD", False, folder=tmp_path, world=2))
    assert {view.source for view in weights(trace)} == {LayoutSource.UNKNOWN}
    assert check(trace).verdict is Verdict.CLEAN


@pytest.mark.parametrize("is_faulty", [True, False])
def test_runs_at_one_place_of_both_rows_are_replicas(
    ranks: RankPool, tmp_path: Path, is_faulty: bool
) -> None:
    out = traced(ranks, job, "HYBRID_SHARD", is_faulty, folder=tmp_path, world=4)
    report = check(open_trace(out))
    first = (f for f in report.findings if (f.phase, f.step) == (Phase.GRADS, 0))
    named = {f"{f.path}:{f.slot}": f.ranks for f in first}
    if not is_faulty:
        assert not report.findings
        return
    # the first rank of a row has all of 0.weight but two elements, the other one all the rest
    beside = dict.fromkeys(("0:grad:bias", "2:grad:weight", "2:grad:bias"), (1, 3))
    assert named == {"0:grad:weight": (0, 1, 2, 3), **beside} and len(report.origins) == 2
    later = {f.phase for f in report.findings if not f.is_origin}
    assert later == {Phase.GRADS, Phase.PARAMS}
