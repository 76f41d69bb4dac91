"""Two pipeline stages, four micro-batches: `torchrun --nproc-per-node 2 examples/pipeline.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gpt import GPT, batch, build, loss_of, options
from training import process_group, rank, report, save_check

MICRO_BATCHES = 4


def stage_of(model: GPT, stage: int, stages: int) -> GPT:
    """Take out of the whole model what other stages hold; layers keep their numbers."""
    names = list(model.layers)
    per_stage = -(-len(names) // stages)
    for name in names:
        if int(name) // per_stage != stage:
            del model.layers[name]
    if stage > 0:
        model.embed = None
    if stage < stages - 1:
        model.norm = None
        model.head = None
    return model


def main() -> None:
    """Train a few steps; the first stage feeds bytes in, the last one knows the loss."""
    asked = options(__doc__)
    with process_group() as device:
        stages = dist.get_world_size()
        model = stage_of(build(asked.sizes), rank(), stages).to(device)
        stage = PipelineStage(model, rank(), stages, device)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(asked.steps):
            inputs, targets = batch(asked.sizes, step)
            optimizer.zero_grad()
            if rank() == 0:
                schedule.step(inputs.to(device))
            elif rank() < stages - 1:
                schedule.step()
            else:
                parts: list[Tensor] = []
                schedule.step(target=targets.to(device), losses=parts)
                losses.append(torch.stack(parts).mean().item())
                report(step, losses[-1])
            optimizer.step()
        save_check(asked, losses, model.named_parameters())


if __name__ == "__main__":
    main()
