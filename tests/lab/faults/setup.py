"""What one run of a program is, and what it leaves behind for an oracle to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 2
"""Optimizer steps of a program that says nothing else."""
RATE = 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the model and its batches are."""

    layers: int = 2
    hidden: int = 16
    heads: int = 4
    context: int = 8
    """Tokens per sample."""
    batch: int = 8
    """Samples per step over all ranks together."""
    vocabulary: int = 37
    """Odd on purpose: no number of ranks splits it evenly."""
    experts: int = 4
    """In every layer of a program with experts."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % 4:
            raise ValueError(
                f"hidden={self.hidden} with heads={self.heads}: heads must divide hidden, and be a "
                f"multiple of the 4 ranks that may share them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run: which size, how many ranks, which seed, and whether the fault is in."""

    shape: Shape = field(default_factory=Shape)
    ranks: int = 2
    dtype: str = "float32"
    seed: int = 0
    is_faulty: bool = False
    keeps_tensors: bool = False
    """Whether the trace keeps every value whole, for tests/lab/claims.py."""

    @property
    def traced_with(self) -> dict[str, str]:
        """The settings of its trace."""
        return {"steps": "all"} | ({"tensors": "**"} if self.keeps_tensors else {})

    @property
    def layer(self) -> int:
        """The layer the fault sits in."""
        return (self.seed + 1) % self.shape.layers

    @property
    def culprit(self) -> int:
        """The rank the fault sits on, where it sits on one: any but 0, which many bugs spare."""
        return 1 + self.seed % (self.ranks - 1)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return DTYPES[self.dtype]

    def strikes(self, rank: int, layer: int | None = None) -> bool:
        """Whether the fault is in, on this rank, in this layer (or wherever it is asked for)."""
        return self.is_faulty and rank == self.culprit and layer in (None, self.layer)


@dataclass
class Trained:
    """What a program leaves behind on one rank."""

    model: nn.Module
    losses: list[Tensor] = field(default_factory=list)
    """Of every step, as this rank computed them."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, as the optimizer found them; DTensors where parameters are."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """Parameters before the first step, copied."""
    cuts: Mapping[str, int] = field(default_factory=dict)
    """Of parameters cut by hand: the tensor dim they are cut along."""
    group: Any = None
    """The process group whose collectives the oracle asks about."""
    seen: dict[str, list[Tensor]] = field(default_factory=dict)
    """What a program wrote down for its oracle beside all that."""

    def note(self, name: str, value: Tensor) -> None:
        """Keep a copy of a value for the oracle."""
        whole = value.detach()
        self.seen.setdefault(name, []).append(getattr(whole, "_local_tensor", whole).clone())


def train(
    trained: Trained,
    optimizer: torch.optim.Optimizer,
    loss_of_step: Callable[[int], Tensor],
    *,
    before_update: Callable[[int], None] = lambda step: None,
    after_update: Callable[[int], None] = lambda step: None,
    steps: int = STEPS,
) -> Trained:
    """Run a training loop: forward and backward in `loss_of_step`, which returns the loss.

    `before_update` runs between backward and update: reductions by hand, clipping.
    `after_update` runs behind the update: parameters averaged or sent by hand.
    """
    parameters = dict(trained.model.named_parameters())
    trained.before = {name: p.detach().clone() for name, p in parameters.items()}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of_step(step)
        before_update(step)
        if step == 0:
            trained.gradients = {
                name: p.grad.detach().clone()
                for name, p in parameters.items()
                if p.grad is not None
            }
        optimizer.step()
        after_update(step)
        trained.losses.append(loss.detach().clone())
    return trained
