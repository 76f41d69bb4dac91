"""Activation checkpointing around whole models, in itself, and run twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    checkpoint,
)

from tests.agent.test_checkpointing import (
    Block,
    calls,
    program,
)
from tests.unharmed import traced_unharmed


def test_gradients_inside_reentrant_checkpointing_are_the_real_ones(tmp_path: Path) -> None:
    """Its forward runs without gradients, so only what runs again can show them."""

    def gradients(kind: str) -> dict[str, list[float]]:
        found = traced_unharmed(
            lambda: program(kind, is_autocast=False, counts_flops=False), tmp_path / kind
        )
        return {
            f"{n.path} {v.slot}": [v.per_rank()[0].l2]
            for n in found.find("*", phase="backward", step=0)
            for v in n.slots
        }

    reentrant, plain = gradients("reentrant"), gradients("plain")
    assert reentrant == {name: pytest.approx(l2, rel=1e-5) for name, l2 in plain.items()}


def test_a_whole_model_may_be_checkpointed_around_its_root(tmp_path: Path) -> None:
    def body() -> Any:
        block = Block()
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        for _ in range(2):
            checkpoint(block, torch.randn(3, 8), use_reentrant=False).sum().backward()
            optimizer.step()
        return block

    found = traced_unharmed(body, tmp_path / "trace")
    assert [s.step for s in found.steps] == [0, 1]
    assert "up" in calls(found, "recompute")


def test_double_backward_and_a_retained_graph_are_passes_of_their_own(tmp_path: Path) -> None:
    def body() -> Any:
        block = Block()
        x = torch.randn(3, 8, requires_grad=True)
        loss = block(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        loss.backward()
        return block, x.grad

    found = traced_unharmed(body, tmp_path / "trace")
    nodes = found.find("down", phase="backward", step=0)
    assert len(nodes) > 1
    assert [n.ordinal for n in nodes] == list(range(len(nodes)))
