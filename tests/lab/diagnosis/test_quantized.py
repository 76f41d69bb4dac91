"""Modules and parameters that torchao made: left as they are, and judged clean."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rankscope
from rankscope.diagnosis.check import check
from rankscope.layout.placement import LayoutSource
from rankscope.record.finding import Verdict
from rankscope.tree.reader import open_trace
from tests.diagnosis.traced import traced_with_answers
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


class Adapted(nn.Module):
    """A layer whose own weight stands still, and a small one beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(64, 4, bias=False)
        self.up = nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def made(kind: str) -> tuple[nn.Module, type[torch.optim.Optimizer]]:
    """Return a model as torchao converts it, sharded or not, and its optimizer's class."""
    model = Net()
    if kind == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=config)
    elif kind == "int8":
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training
        from torchao.quantization import quantize_

        quantize_(model, int8_weight_only_quantized_training())
    elif kind == "adapter":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
        model.requires_grad_(False)
        model.up, model.down = Adapted(model.up), Adapted(model.down)
    if kind in ("float8", "int8"):
        for layer in (model.up, model.down, model):
            fully_shard(layer)
    if kind == "int8":  # torch's own optimizers do not know its weights
        from torchao.optim import AdamW8bit

        return model, AdamW8bit
    return model, torch.optim.AdamW


def trains(kind: str, steps: str, out: str) -> tuple[list[float], str]:
    """Return the losses, and what the parameters hold in the end."""
    torch.manual_seed(0)
    model, optimizer_class = made(kind)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = optimizer_class(trained, lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    losses = []

    def step() -> None:
        x = torch.randn(8, 64)
        loss = (model(x) - x).square().mean()
        loss.backward()
        if kind not in ("float8", "int8"):
            for each in trained:
                dist.all_reduce(each.grad)
                each.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if steps:
        with rankscope.trace(model, out=out, steps=steps):
            for _ in range(3):
                step()
    else:
        for _ in range(3):
            step()
    state = hashlib.sha256()
    for parameter in model.parameters():
        for part in parts(parameter.detach()):
            state.update(part.view(torch.uint8).numpy().tobytes())
    return losses, state.hexdigest()


def parts(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor is made of."""
    value = getattr(value, "_local_tensor", value)
    if type(value) in (torch.Tensor, nn.Parameter):
        yield value.contiguous().reshape(-1)
        return
    for name in value.__tensor_flatten__()[0]:
        yield from parts(getattr(value, name))


@pytest.mark.parametrize("kind", ["float8", "int8", "adapter"])
def test_what_torchao_made_trains_as_without_tracing_and_is_judged_clean(
    ranks: RankPool, tmp_path: Path, kind: str
):
    plain = ranks.run(trains, kind, "", "", world_size=2)
    out, traced = traced_with_answers(ranks, trains, kind, "all", folder=tmp_path, world=2)
    assert traced == plain
    trace = open_trace(out)
    assert trace.is_complete
    report = check(trace)
    assert report.verdict is Verdict.CLEAN
    assert not report.findings
    if kind in ("float8", "int8"):
        (setup,) = trace.find("up", phase="setup")
        (weight,) = [slot for slot in setup.slots if slot.slot == "param:weight"]
        assert weight.source is LayoutSource.DTENSOR
        assert {str(each) for each in weight.placements.values()} == {"Shard(0)"}
