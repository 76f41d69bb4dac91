"""FSDP2 times tensor parallelism, 2x2: `torchrun --nproc-per-node 4 examples/fsdp2_tp.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from gpt import batch, build, loss_of, options
from tensor_parallel import parallelize
from training import process_group, rank, report, save_check


def main() -> None:
    """Train a few steps; ranks 0 and 1 share a batch, so do 2 and 3."""
    asked = options(__doc__)
    with process_group() as device:
        shape = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
        model = build(asked.sizes).to(device)
        parallelize(model, mesh["tp"])
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(asked.steps):
            inputs, targets = batch(asked.sizes, step, mesh.get_local_rank("dp"), shape[0])
            optimizer.zero_grad()
            with loss_parallel():
                loss = loss_of(model(inputs.to(device)), targets.to(device))
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if rank() == 0:
                report(step, losses[-1])
        save_check(asked, losses, model.named_parameters())


if __name__ == "__main__":
    main()
