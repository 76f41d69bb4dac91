"""Tensor and sequence parallelism with DTensor, the loss computed on split logits.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from gpt import GPT, batch, build, loss_of, options
from training import process_group, rank, report, save_check


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Split heads, feed-forward and logits over the mesh; activations between are split by time."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        },
    )
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.q_proj": ColwiseParallel(),
                "attention.k_proj": ColwiseParallel(),
                "attention.v_proj": ColwiseParallel(),
                "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.up_proj": ColwiseParallel(),
                "feed_forward.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def main() -> None:
    """Train a few steps, every rank on the whole batch and its part of the model."""
    asked = options(__doc__)
    with process_group() as device:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        model = build(asked.sizes).to(device)
        parallelize(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(asked.steps):
            inputs, targets = batch(asked.sizes, step)
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
