"""torch's own defects, on the running version as `tests/torches.py` and the documentation say."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard

from tests import torches
from tests.distributed.pool import RankPool


def what_torch_does() -> tuple[float, float, bool]:
    mesh = init_device_mesh("cpu", (2,))
    given = torch.zeros(1)
    dist.reduce_scatter_tensor(given, torch.ones(2), op=dist.ReduceOp.AVG)
    model, whole = nn.Linear(2, 2), nn.Linear(2, 2)
    fully_shard(model, mesh=mesh)
    for each in (model, whole):
        each(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad
    assert isinstance(gradient, DTensor) and whole.weight.grad is not None
    gathers = False
    with contextlib.suppress(RuntimeError):
        DTensor.from_local(torch.ones(2, dtype=torch.complex64), mesh, [Shard(0)]).full_tensor()
        gathers = True
    return given.item(), (gradient.full_tensor() / whole.weight.grad).mean().item(), gathers


def test_torch_averages_and_gathers_over_gloo_as_its_version_is_said_to(ranks: RankPool) -> None:
    """FSDP2 averages by the one reduction that torch 2.8 does as a sum."""
    factor = 2.0 if torches.GLOO_SUMS_FOR_AVERAGES else 1.0
    expected = (factor, factor, torches.GATHERS_COMPLEX)
    assert ranks.run(what_torch_does, world_size=2) == [expected] * 2
    assert hasattr(ScheduleGPipe, "eval") is torches.HAS_SCHEDULE_EVAL
