"""Fully sharded data parallelism: `torchrun --nproc-per-node 2 examples/fsdp2.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpt import batch, build, loss_of, options
from training import process_group, rank, report, save_check


def main() -> None:
    """Train a few steps, parameters split over all ranks."""
    asked = options(__doc__)
    with process_group() as device:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = build(asked.sizes).to(device)
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
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
