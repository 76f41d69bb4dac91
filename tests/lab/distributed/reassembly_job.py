"""What gloo ranks do for test_reassembly: make DTensors of every kind, and let torch gather them.

A case is a value as one rank holds it, described as a trace records it, beside what torch's own
`full_tensor()` makes of it on that rank.
"""

from __future__ import annotations

import io
import itertools
import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rankscope.capture.describe import Describer
from rankscope.capture.torch_internals.tensors import invisible
from rankscope.layout.plan import Piece
from tests.torches import (
    GATHERS_COMPLEX,
    GATHERS_STRIDED_SHARDS,
    PADS_EMPTY,
    STRIDED_SHARDS_ARE_CUT_EVENLY,
)

_COMPLEX = [torch.complex64]
GATHERED = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
GATHERED += _COMPLEX * GATHERS_COMPLEX
"""dtypes gloo gathers."""
NOT_GATHERED = [torch.float8_e4m3fn, torch.int16, *_COMPLEX * (not GATHERS_COMPLEX)]
"""dtypes for which gloo has no collective: torch's full_tensor raises."""


@dataclass(frozen=True)
class Case:
    name: str
    piece: Piece
    local: torch.Tensor
    full: torch.Tensor | None
    """What torch gathers, None where it cannot."""
    truth: torch.Tensor | None
    """The tensor that was distributed, where there was one."""
    is_exact: bool = True
    """False for floating sums, whose last bits depend on the order."""


class Bench:
    """Describes values as the hooks do."""

    def __init__(self) -> None:
        self._describer = Describer(dist.get_rank())

    def case(
        self,
        name: str,
        value: torch.Tensor,
        truth: torch.Tensor | None = None,
        *,
        is_exact: bool = True,
        gathers: bool = True,
    ) -> Case:
        with invisible():
            meta = self._describer.describe(value)[0].meta
        assert isinstance(value, DTensor)
        return Case(
            name=f"{name} {tuple(value.shape)} {value.dtype} {value.placements}",
            piece=Piece(
                shape=meta.shape,
                layout=meta.layout,
                global_shape=meta.global_shape,
                ranges=meta.ranges,
            ),
            local=value.to_local().detach().clone(),
            full=value.detach().full_tensor().clone() if gathers else None,
            truth=None if truth is None else truth.detach(),
            is_exact=is_exact,
        )


def bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bit patterns, NaNs and infinities among them."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=rng)
    return raw.view(dtype).reshape(tuple(shape))


def meshes() -> list[DeviceMesh]:
    """Every way to arrange these ranks in one to three axes."""
    extents = {2: [(2,), (1, 2), (2, 1)], 4: [(4,), (2, 2), (1, 2, 2), (2, 1, 2), (4, 1)]}
    names = ("outer", "middle", "inner")
    return [
        init_device_mesh("cpu", each, mesh_dim_names=names[-len(each) :])
        for each in extents[dist.get_world_size()]
    ]


def shards(bench: Bench, count: int) -> Iterator[Case]:
    rng = random.Random(dist.get_world_size())
    places = meshes()
    for number in range(count):
        mesh = rng.choice(places)
        shape = [rng.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 11]) for _ in range(rng.randint(1, 3))]
        placements: list[Placement] = [
            rng.choice([Replicate(), *(Shard(dim) for dim in range(len(shape))), Shard(-1)])
            for _ in range(mesh.ndim)
        ]
        gathers = number % 8 != 0 and (PADS_EMPTY or 0 not in shape)
        truth = bits(shape, rng.choice(GATHERED if gathers else NOT_GATHERED), number)
        value = distribute_tensor(truth, mesh, placements, src_data_rank=None)
        yield bench.case(f"shards of {mesh.shape}", value, truth, gathers=gathers)


def backward_meshes(bench: Bench) -> Iterator[Case]:
    """Ranks in falling order: a group sorts them, so what torch gathers is permuted."""
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).flip(0), mesh_dim_names=("x",))
    for rows in (4, 7):
        truth = torch.arange(2.0 * rows).reshape(rows, 2)
        value = distribute_tensor(truth, mesh, [Shard(0)], src_data_rank=None)
        yield bench.case("backward", value, truth, gathers=False)


def strided_shards(bench: Bench, count: int) -> Iterator[Case]:
    rng = random.Random(100 + dist.get_world_size())
    places = meshes()
    for number in range(count):
        mesh = rng.choice(places)
        sizes = [48, 96] if STRIDED_SHARDS_ARE_CUT_EVENLY else [1, 2, 3, 5, 8, 9, 12, 16]
        shape = [rng.choice(sizes) for _ in range(rng.randint(1, 2))]
        kinds = [_StridedShard(0, split_factor=n) for n in (1, 2, 3, 4)]
        last = len(shape) - 1
        kinds += [_StridedShard(last, split_factor=2), Shard(0), Shard(last), Replicate()]
        placements = [rng.choice(kinds) for _ in range(mesh.ndim)]
        if mesh.ndim == 2 and number % 2:  # what FSDP2 over tensor parallelism makes
            placements = [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
        truth = bits(shape, rng.choice(GATHERED), number)
        value = distribute_tensor(truth, mesh, placements, src_data_rank=None)
        gathers = torch_gathers(mesh, placements)
        yield bench.case(f"strided shards of {mesh.shape}", value, truth, gathers=gathers)


def torch_gathers(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """False for dims cut along two axes, once strided: there torch 2.13's full_tensor raises, hangs
    or permutes, except in the one form that FSDP2 makes.
    """
    if not GATHERS_STRIDED_SHARDS and any(isinstance(p, _StridedShard) for p in placements):
        return (
            mesh.ndim == 2
            and mesh.size(0) > 1
            and mesh.size(1) > 1
            and placements == [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
        )
    by_dim: dict[int, list[tuple[int, Placement]]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard) and mesh.size(axis) > 1:
            by_dim.setdefault(placement.dim, []).append((axis, placement))
    for cuts in by_dim.values():
        if len(cuts) == 1 or not any(isinstance(p, _StridedShard) for _, p in cuts):
            continue
        (_, outer), (inner_axis, inner), *more = cuts
        is_fsdp = (
            not more
            and isinstance(outer, _StridedShard)
            and outer.split_factor == mesh.size(inner_axis)
            and not isinstance(inner, _StridedShard)
        )
        if not is_fsdp:
            return False
    return True


def partials(bench: Bench, count: int) -> Iterator[Case]:
    """Sums, averages and products over up to four ranks, of integers and of anything, also of
    shards and of replicas."""
    rng = random.Random(200 + dist.get_world_size())
    places, rank = meshes(), dist.get_rank()
    for number in range(count):
        mesh = rng.choice(places)
        op = ("sum", "avg", "product", "min", "max")[number // 3 % 5]
        axis = rng.randrange(mesh.ndim)
        placements: list[Placement] = [
            rng.choice([Replicate(), Shard(0), Shard(1), Partial(op)]) for _ in range(mesh.ndim)
        ]
        placements[axis] = Partial(op)
        at = mesh.get_coordinate()
        assert at is not None
        # replicas have to hold the same values
        place = sum(10**i * a for i, (a, p) in enumerate(zip(at, placements)) if p != Replicate())
        draw = torch.Generator().manual_seed(1000 * number + place)
        is_integral = number % 3 != 0
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        if is_integral and op != "avg":
            dtype = rng.choice([dtype, torch.int64, torch.int32])
        shape = (rng.randint(1, 4), rng.randint(1, 5))
        if is_integral:
            low, high, step = (-2, 3, 1) if op == "product" else (-20, 21, 4 if op == "avg" else 1)
            local = (torch.randint(low, high, shape, generator=draw) * step).to(dtype)
        else:
            local = torch.randn(shape, generator=draw).to(dtype)
        value = DTensor.from_local(local, mesh, placements, run_check=False)
        is_exact = is_integral or op in ("min", "max")
        yield bench.case(f"partials over {mesh.shape}, rank {rank}", value, is_exact=is_exact)


def model(rows: int, columns: int) -> nn.Sequential:
    torch.manual_seed(rows)
    return nn.Sequential(nn.Linear(columns, rows), nn.ReLU(), nn.Linear(rows, columns))


SIZES = [(16, 8), (10, 6), (6, 3), (5, 7), (1, 4)]
"""Uneven ones and one too narrow for its axis."""


def outputs_of(module: nn.Module) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    return seen


def models(bench: Bench) -> Iterator[Case]:
    """Parameters, outputs and gradients under FSDP2, tensor parallelism, and both."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    for (rows, columns), kind in itertools.product(SIZES, ("fsdp", "tp", "both")):
        whole = model(rows, columns)
        made = model(rows, columns)
        truths = dict(whole.named_parameters())
        if kind != "fsdp":
            parallelize_module(made, square["tp"], plan)
        if kind != "tp":
            fully_shard(made, mesh=flat if kind == "fsdp" else square["dp"])
        # torch's full_tensor breaks on FSDP2 over a tensor-parallel shard of no width
        is_bare = kind == "both" and rows == 1
        gathers = not is_bare and not (
            kind == "both" and STRIDED_SHARDS_ARE_CUT_EVENLY and rows % world
        )
        place = dist.get_rank() // (2 if kind != "fsdp" else 1)
        x = torch.randn(4, columns, generator=torch.Generator().manual_seed(place))
        name = f"{kind} {rows}x{columns}"
        for key, parameter in made.named_parameters():
            yield bench.case(f"{name} {key}", parameter, truths[key], gathers=gathers)
        if is_bare:  # nor does it train
            continue
        seen = outputs_of(made[0])
        made(x).square().sum().backward()
        for key, parameter in made.named_parameters():
            if parameter.grad is not None:
                yield bench.case(f"{name} gradient of {key}", parameter.grad, gathers=gathers)
        if kind != "fsdp":
            assert isinstance(seen[0], DTensor)
            yield bench.case(f"{name} output", seen[0], gathers=rows > 1)


def run(count: int) -> bytes:
    """Return all cases as torch saves them: plain pickle cannot carry every dtype."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    bench = Bench()
    cases = [
        *shards(bench, count),
        *backward_meshes(bench),
        *strided_shards(bench, count),
        *partials(bench, count),
        *models(bench),
    ]
    saved = io.BytesIO()
    torch.save(cases, saved)
    return saved.getvalue()
