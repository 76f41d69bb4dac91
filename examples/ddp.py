"""Data parallelism with replicas: `torchrun --nproc-per-node 2 examples/ddp.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt import Options, batch, build, loss_of, options
from training import process_group, rank, report, save_check


def main() -> None:
    """Train a few steps, each rank on its own rows of the batch."""
    asked = options(__doc__)
    with process_group() as device:
        train(asked, device)  # the model goes before its group: with gloo the other order can hang


def train(asked: Options, device: torch.device) -> None:
    """Build the model and take the steps that were asked for."""
    model = DistributedDataParallel(build(asked.sizes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(asked.steps):
        inputs, targets = batch(asked.sizes, step, rank(), dist.get_world_size())
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
