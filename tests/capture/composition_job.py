"""What four gloo ranks do for test_composition: each reads its part of every DTensor."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankscope.capture.describe import Describer
from rankscope.capture.digest import Digester
from rankscope.capture.torch_internals.distributed import process_groups
from rankscope.capture.torch_internals.tensors import invisible

WORLD = 4
SHAPES = [(8, 6), (7, 5), (6000, 3), (3, 4, 2), (1, 9), (2, 5003)]
Case = tuple[str, torch.Tensor, torch.Tensor]
"""Name, DTensor, the whole value."""


def seeded(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5


def sharded(mesh: DeviceMesh, name: str) -> Iterator[Case]:
    kinds = (
        [Shard(0), Shard(1), Replicate()] if mesh.ndim > 1 else [Shard(0), Shard(-1), Replicate()]
    )
    for shape in SHAPES[-5::2] if mesh.ndim > 1 else SHAPES:
        for placements in itertools.product(kinds, repeat=mesh.ndim):
            whole = seeded(shape, 1)
            yield f"{name} {shape} {placements}", distribute_tensor(whole, mesh, placements), whole


def partial(mesh: DeviceMesh, name: str, rank: int) -> Iterator[Case]:
    local = seeded((5, 6), 10 + rank)
    for op in ("sum", "avg", "max"):
        for others in itertools.product([Shard(0), Replicate(), Partial(op)], repeat=mesh.ndim - 1):
            mine = seeded((5, 6), 99) if Replicate() in others else local
            value = DTensor.from_local(mine, mesh, [*others, Partial(op)], run_check=False)
            yield f"{name} partial {op} {others}", value, value.full_tensor()


def strided(mesh: DeviceMesh) -> Iterator[Case]:
    """Yield FSDP2 over tensor parallel parameters: strided, uneven and empty shards."""
    for rows, columns in ((16, 8), (10, 6), (6, 3), (1, 4)):
        torch.manual_seed(rows)
        model = nn.Sequential(nn.Linear(columns, rows), nn.Linear(rows, columns))
        wholes = {name: p.detach().clone() for name, p in model.named_parameters()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        for name, parameter in model.named_parameters():
            yield f"fsdp over tp {rows}x{columns} {name}", parameter, wholes[name]


def masked(mesh: DeviceMesh) -> Iterator[Case]:
    table = distribute_tensor(seeded((12, 4), 3), mesh, [Shard(0)])
    ids = distribute_tensor(torch.arange(10) % 12, mesh, [Replicate()])
    out = nn.functional.embedding(ids, table)
    yield "vocabulary parallel embedding", out, out.full_tensor()


def read(case: Case, describer: Describer, digester: Digester) -> dict[str, Any]:
    name, value, whole = case
    with invisible():
        described, local = describer.describe(value)
        reading = digester.read(local, described.meta.ranges, samples=False)
    with torch.no_grad():
        reference = Digester().read(whole.detach(), None, samples=False)
    meta = described.meta
    return {
        "name": name,
        "placements": meta.layout.by_axis(),
        "composable": all(p.is_composable for p in meta.layout.placements),
        "coordinate": meta.layout.mesh.coordinate(dist.get_rank()) if meta.layout.mesh else None,
        "mesh_shape": meta.layout.mesh.shape if meta.layout.mesh else None,
        "note": meta.note,
        "reading": reading._replace(samples=None)._asdict(),
        "whole": reference._replace(samples=None)._asdict(),
    }


def in_place_all_reduce() -> dict[str, Any]:
    digester, x = Digester(), seeded((64, 8), dist.get_rank())
    before, version = digester.read(x, None, samples=False), x._version
    dist.all_reduce(x)
    after = digester.read(x, None, samples=False)
    expected = Digester().read(sum(seeded((64, 8), r) for r in range(WORLD)), None, samples=False)
    return {
        "version_unchanged": x._version == version,
        "reused": after.reused,
        "before": before.l2,
        "after": after.l2,
        "expected": expected.l2,
    }


def pending(describer: Describer, mesh: DeviceMesh) -> dict[str, Any]:
    gathered = all_gather_tensor(torch.ones(2), 0, mesh)
    described, _ = describer.describe(gathered)
    wrapped = DTensor.from_local(gathered, mesh, [Replicate()], run_check=False)
    inside, _ = describer.describe(wrapped)
    completed = gathered.completed
    gathered.wait()
    return {
        "is_pending": described.is_pending,
        "can_digest": described.can_digest,
        "inside_dtensor": inside.is_pending,
        "completed_before_wait": completed,
    }


def outside(describer: Describer) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", [0, 1])
    described, local = describer.describe(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    return {
        "note": described.meta.note,
        "ranges": described.meta.ranges,
        "count": Digester().read(local, described.meta.ranges, samples=False).count,
    }


def run() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    describer, digester = Describer(rank), Digester()
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cases = itertools.chain(
        sharded(flat, "1d"),
        sharded(square, "2d"),
        partial(flat, "1d", rank),
        partial(square, "2d", rank),
        strided(square),
        masked(flat),
    )
    named = dist.new_group([0, 2], group_desc="evens")
    result = {
        "cases": [read(case, describer, digester) for case in cases],
        "all_reduce": in_place_all_reduce(),
        "pending": pending(describer, flat),
        "outside": outside(describer),
        "groups": [[g.name, g.ranks, g.backend, g.description] for g in process_groups()],
    }
    del cases, named
    return result
