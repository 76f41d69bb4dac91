"""Train in one process: `python examples/one_process.py`."""

from __future__ import annotations

import torch

from gpt import batch, build, loss_of, options
from training import device_of_rank, report, save_check


def main() -> None:
    """Train a few steps."""
    asked = options(__doc__)
    device = device_of_rank()
    model = build(asked.sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(asked.steps):
        inputs, targets = batch(asked.sizes, step)
        optimizer.zero_grad()
        loss = loss_of(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
    save_check(asked, losses, model.named_parameters())


if __name__ == "__main__":
    main()
