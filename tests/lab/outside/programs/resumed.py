"""DDP goes on from a checkpoint of model and optimizer.

Wrong: rank 0 alone loads, since DDP sends its parameters to all; the optimizer's state is not sent.
"""

import torch
from common import Gpt, Job, cross_entropy, rows, run, wait_for
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def step_of(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids, targets = rows(step, 12)
    cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
    optimizer.step()
    optimizer.zero_grad()


def main(job: Job) -> None:
    torch.manual_seed(5 + job.rank)
    model = Gpt()
    if job.prepare:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(3):
            step_of(job, model, optimizer, step)
        torch.save([model.state_dict(), optimizer.state_dict()], job.file)
        return
    loads = job.rank == 0 or not job.wrong
    held = torch.load(wait_for(job.file))
    if loads:
        model.load_state_dict(held[0])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3)
    if loads:
        optimizer.load_state_dict(held[1])
    for step in range(3, 6):
        step_of(job, wrapped, optimizer, step)
    job.keep(model.named_parameters())


run(main)
