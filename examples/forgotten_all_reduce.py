"""Tensor parallelism by hand, with a bug: the attention of the last layer forgets its all-reduce.

torchrun --nproc-per-node 2 examples/forgotten_all_reduce.py

Nothing raises, and the loss goes down.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPT, batch, build, loss_of, options
from training import process_group, rank, report, save_check


class Enter(torch.autograd.Function):
    """Into a split region: the gradients of all ranks are summed on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return `x` as it is."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the sum over ranks."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


class Leave(torch.autograd.Function):
    """Out of a split region: the partial sums of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the sum over ranks."""
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient as it is."""
        return gradient


class Column(nn.Module):
    """This rank's output features of a linear layer: [..., inside] to [..., outside / ranks]."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(dist.get_world_size(), 0)[rank()])

    def forward(self, x: Tensor) -> Tensor:
        """Map with this rank's rows of the weight."""
        return F.linear(Enter.apply(x), self.weight)


class Row(nn.Module):
    """This rank's input features of a linear layer: [..., inside / ranks] to [..., outside]."""

    def __init__(self, whole: nn.Linear, is_reducing: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(dist.get_world_size(), 1)[rank()])
        self.is_reducing = is_reducing

    def forward(self, x: Tensor) -> Tensor:
        """Map with this rank's columns of the weight: a partial sum until it is reduced."""
        partial = F.linear(x, self.weight)
        return Leave.apply(partial) if self.is_reducing else partial


def split(model: GPT) -> None:
    """Replace the linear layers of each block by this rank's part of them."""
    last = str(len(model.layers) - 1)
    for number, layer in model.layers.items():
        attention, feed_forward = layer.attention, layer.feed_forward
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, Column(getattr(attention, name)))
        attention.o_proj = Row(attention.o_proj, is_reducing=number != last)  # the bug
        feed_forward.up_proj = Column(feed_forward.up_proj)
        feed_forward.down_proj = Row(feed_forward.down_proj)


def main() -> None:
    """Train a few steps, every rank on the whole batch and its part of the model."""
    asked = options(__doc__)
    with process_group() as device:
        model = build(asked.sizes)
        split(model)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(asked.steps):
            inputs, targets = batch(asked.sizes, step)
            optimizer.zero_grad()
            loss = loss_of(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if rank() == 0:
                report(step, losses[-1])
        save_check(asked, losses, model.named_parameters())


if __name__ == "__main__":
    main()
