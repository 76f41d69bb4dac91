"""A traced job whose one module hands out DTensors of every placement beside the whole values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rankscope
from tests.capture import composition_job as cases


class Emit(nn.Module):
    """Returns what it was made with."""

    def __init__(self, values: dict[str, dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.values = values

    def forward(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the values, untouched."""
        return self.values


def run(out: str) -> None:
    """Build every case, then trace one forward."""
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = [
        *cases.sharded(line, "line"),
        *cases.sharded(square, "square"),
        *cases.partial(line, "line", rank),
        *cases.partial(square, "square", rank),
        *cases.strided(square),
        *cases.masked(line),
    ]
    # not `detach()`: torch 2.15 reduces the partial of a masked embedding first, and raises there
    parts = {f"c{number}": value for number, (_, value, _) in enumerate(found)}
    wholes = {f"c{number}": whole.detach().clone() for number, (_, _, whole) in enumerate(found)}
    with rankscope.trace(out=out, steps="all", phases="forward"), torch.no_grad():
        Emit({"part": parts, "whole": wholes})()
