"""Activation checkpointing in all its kinds, alone and with autocast and a FLOP counter around: the
numbers are bitwise the same, and what ran again is told from what ran first.

Facts about torch's checkpointing stand here as torch 2.13 has them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

from rankscope.tree.views import Trace
from tests.unharmed import traced_unharmed

MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Block(nn.Module):
    """Dropout, so that the random state counts, and a part behind the last value backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout = nn.Linear(8, 16), nn.Dropout(0.3)
        self.down, self.last = nn.Linear(16, 8), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.down(self.dropout(nn.functional.gelu(self.up(x)))))


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep matrix products, recompute the rest."""
    keeps = operation in MATRIX_PRODUCTS
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"use_reentrant": False},
    "no early stop": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(policy),
    },
    "reentrant": {"use_reentrant": True},
}


class Model(nn.Module):
    """Two checkpointed blocks and a head; `inner` alone is checkpointed where that is asked."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options, self.stops_early = options, options is not KINDS["no early stop"]
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with set_checkpoint_early_stop(self.stops_early):
                x = checkpoint(layer, x, **self.options)
        return self.head(x)


def program(kind: str, *, is_autocast: bool, counts_flops: bool) -> Any:
    """Two steps; losses, gradients, parameters and FLOPs."""
    model, seen = Model(KINDS[kind]), []
    optimizer = torch.optim.AdamW(model.parameters())
    counter = FlopCounterMode(display=False)
    for _ in range(2):
        with counter if counts_flops else contextlib.nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
                loss = model(torch.randn(4, 8, requires_grad=True)).float().square().mean()
            loss.backward()
        seen.append([loss, *[p.grad.clone() for p in model.parameters() if p.grad is not None]])
        optimizer.step()
        optimizer.zero_grad()
    flops = {k: sorted(map(str, v.items())) for k, v in counter.get_flop_counts().items()}
    assert bool(counter.get_total_flops()) == counts_flops
    return model, optimizer, seen, counter.get_total_flops(), sorted(flops.items())


def calls(found: Trace, phase: str, step: int = 1) -> dict[str, str]:
    """Return {path: status} of one phase."""
    return {n.path: n.status for n in found.find("*", phase=phase, step=step)}


@pytest.mark.parametrize("counts_flops", [False, True], ids=["", "flops"])
@pytest.mark.parametrize("is_autocast", [False, True], ids=["", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_checkpointing_runs_again_is_told_apart_and_harmed_in_nothing(
    tmp_path: Path, kind: str, is_autocast: bool, counts_flops: bool
) -> None:
    found = traced_unharmed(
        lambda: program(kind, is_autocast=is_autocast, counts_flops=counts_flops),
        tmp_path / "trace",
    )
    parts = ("", ".up", ".dropout", ".down", ".last")
    blocks = {f"layers.{i}{part}" for i in range(2) for part in parts}
    forward, again = calls(found, "forward"), calls(found, "recompute")
    assert forward == dict.fromkeys(["", *sorted(blocks), "head"], "returned")
    assert [s.step for s in found.steps] == [0, 1], "a module called inside backward is no root"
    if kind in ("reentrant", "no early stop"):
        assert again == dict.fromkeys(blocks, "returned")
    else:  # what stands behind the last saved value is not run: partial, and not a fault
        assert again == {
            f"layers.{i}{part}": "returned" if part in (".up", ".dropout") else "stopped"
            for i in range(2)
            for part in parts[:-1]
        }
    for block in ("layers.0.up", "layers.1.up"):
        first = found.value(block, "output", step=1).per_rank[0]
        second = found.value(block, "output", phase="recompute", step=1).per_rank[0]
        assert first is not None and second is not None and first.hash == second.hash
    assert set(calls(found, "backward")) == {"", "head", *blocks}
    assert not any(n.errors for n in found.walk())
