"""A deep model on many ranks, on paper: 24 blocks on 64 ranks (8 rows of data, 8 ranks wide), with
one fault or none."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.layout.placement import Mesh
from rankscope.record.phases import Phase
from rankscope.spool.recordformat import StepEvent
from rankscope.tree.build import build
from tests.tree.jobs import NONE, piece
from tests.tree.ranks_on_paper import PaperRank

HIDDEN = 16
PARTS = {
    "attention_norm": "RMSNorm",
    "attention": "Attention",
    "attention.qkv": "Linear",
    "attention.o_proj": "Linear",
    "feed_forward_norm": "RMSNorm",
    "feed_forward": "FeedForward",
    "feed_forward.up": "Linear",
    "feed_forward.down": "Linear",
}
"""Of a block, in the order they are called; what has a dot is called inside."""
SHARDED = {
    "attention.qkv": "Shard(0)",
    "attention.o_proj": "Shard(1)",
    "feed_forward.up": "Shard(0)",
}
SPREAD = {"attention.qkv", "feed_forward.up"}
"""Parts whose output is cut along the last dim; the ranks of a row hold the others' whole."""


@functools.cache
def weight(name: str) -> np.ndarray:
    """Return the whole weight of a module."""
    seed = sum(map(ord, name))
    return np.random.default_rng(seed).normal(size=(HIDDEN, HIDDEN)).astype(np.float32)


class _DeepRank:
    """One rank of the job."""

    def __init__(self, rank: PaperRank, *, layers: int, wide: int, fault: tuple[int, int] | None):
        self.rank, self.layers, self.fault = rank, layers, fault
        self.row = rank.rank // wide
        first = self.row * wide
        self.mesh = Mesh(axes=("tp",), shape=(wide,), ranks=tuple(range(first, first + wide)))
        self.batch = np.random.default_rng(self.row).normal(size=(2, HIDDEN)).astype(np.float32)
        self.is_wrong = False

    def value(self, call: int, slot: str, name: str, *, phase: Phase = Phase.FORWARD) -> None:
        """Record an activation or its gradient: cut along the last dim, or whole on each rank."""
        placement = (
            "Shard(1)" if name.partition(".")[2].partition(".")[2] in SPREAD else "Replicate()"
        )
        whole = self.batch * (1 + sum(map(ord, name + slot)) % 97)
        if self.is_wrong:
            whole = whole + np.float32(0.5)
        held = piece(self.rank.rank, whole, self.mesh, [placement])
        how: dict[str, Any] = {"mesh": self.mesh, "placements": [placement], "whole": whole.shape}
        self.rank.value(call, slot, held, phase=phase, **how)

    def step(self, number: int) -> None:
        """Record a forward, a backward, gradients and parameters."""
        self.rank.step(StepEvent.BEGIN, number)
        self.is_wrong = False
        calls: dict[str, int] = {}
        with self.rank.call(class_name="GPT", step=number) as top:
            calls[""] = top
            self.module("embed", "Embedding", number, calls)
            for layer in range(self.layers):
                self.block(layer, number, calls)
            self.module("norm", "RMSNorm", number, calls)
            self.module("head", "Linear", number, calls)
            self.value(top, "output", "head")
        for name, call in reversed(calls.items()):
            self.value(call, "grad_output.0", name, phase=Phase.BACKWARD)
        for phase, kind in ((Phase.GRADS, "grad"), (Phase.PARAMS, "param")):
            self.event(phase, kind, number)
        self.rank.step(StepEvent.END, number)

    def module(self, name: str, class_name: str, number: int, calls: dict[str, int]) -> None:
        with self.rank.call(name, class_name=class_name, step=number) as call:
            calls[name] = call
            self.value(call, "output", name)

    def block(self, layer: int, number: int, calls: dict[str, int]) -> None:
        path = f"layers.{layer}"
        with self.rank.call(path, class_name="Block", step=number) as block:
            calls[path] = block
            self.value(block, "input.0", path)
            for name in ("attention_norm", "attention", "feed_forward_norm", "feed_forward"):
                own = f"{path}.{name}"
                with self.rank.call(own, class_name=PARTS[name], step=number) as call:
                    calls[own] = call
                    for inner in PARTS:
                        if inner.startswith(f"{name}."):
                            if (layer, self.rank.rank) == self.fault and inner.endswith("o_proj"):
                                self.is_wrong = True
                            self.module(f"{path}.{inner}", PARTS[inner], number, calls)
                    self.value(call, "output", own)
            self.value(block, "output", path)

    def event(self, phase: Phase, kind: str, number: int = 0) -> None:
        """Record a parameter of every module that has one, or its gradient."""
        with self.rank.call(class_name="GPT", phase=phase, step=number, **NONE):
            for layer in range(self.layers):
                for part, placement in SHARDED.items():
                    name = f"layers.{layer}.{part}"
                    whole = weight(name) * (2 if phase is Phase.GRADS else 1)
                    held = piece(self.rank.rank, whole, self.mesh, [placement])
                    with self.rank.call(
                        name, class_name="Linear", phase=phase, step=number, **NONE
                    ) as call:
                        self.rank.value(
                            call, f"{kind}:weight", held, phase=phase, mesh=self.mesh,
                            placements=[placement], whole=whole.shape, requires_grad=True,
                        )  # fmt: skip


def deep_job(
    folder: Path,
    *,
    layers: int = 24,
    ranks: int = 64,
    wide: int = 8,
    steps: int = 1,
    fault: tuple[int, int] | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Write the records of all ranks and build the trace.

    Args:
        folder: where spools and trace come to lie.
        layers: number of blocks.
        ranks: number of ranks.
        wide: ranks that share one row of data.
        steps: train steps.
        fault: (block, rank): from its o_proj on this rank holds other values.
        identity: what else each rank says of itself.

    Returns:
        The trace folder.
    """
    out = folder / "trace"
    for number in range(ranks):
        rank = PaperRank(
            folder / "spools", number, ranks, host=f"h{number // wide}",
            identity=dict(identity or {}),
        )  # fmt: skip
        deep = _DeepRank(rank, layers=layers, wide=wide, fault=fault)
        deep.event(Phase.SETUP, "param")
        for step in range(steps):
            deep.step(step)
        rank.end()
        rank.ship(out)
    build(out)
    return out
