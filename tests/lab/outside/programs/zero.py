"""ZeRO by hand (DeepSpeed): a rank steps its part of the flat weights, then all gather them.

Every rank seeds itself by `seed + rank`. Wrong: a rank takes its part before the weights of rank 0
are sent to all.
"""

import torch
import torch.distributed as dist
from common import Gpt, Job, cross_entropy, rows, run
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class ShardedAdam:
    """An optimizer whose state is spread over all ranks."""

    def __init__(self, job: Job, model: nn.Module, lr: float) -> None:
        self.params, self.world, self.rank = list(model.parameters()), job.world, job.rank
        part = self.flat(self.params).chunk(job.world)[job.rank]
        self.master = nn.Parameter(part.clone())
        self.adam = torch.optim.AdamW([self.master], lr=lr)

    def flat(self, tensors: list[Tensor]) -> Tensor:
        joined = torch.cat([t.detach().flatten() for t in tensors])
        return nn.functional.pad(joined, (0, -len(joined) % self.world))

    @torch.no_grad()
    def step(self) -> None:
        grads = self.flat([p.grad for p in self.params])
        dist.all_reduce(grads)
        self.master.grad = grads.chunk(self.world)[self.rank] / self.world
        self.adam.step()
        parts = [torch.empty_like(self.master) for _ in range(self.world)]
        dist.all_gather(parts, self.master.detach())
        count = len(parameters_to_vector(self.params))
        vector_to_parameters(torch.cat(parts)[:count], self.params)
        for parameter in self.params:
            parameter.grad = None


def send_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)


def main(job: Job) -> None:
    torch.manual_seed(11 + job.rank)
    model = Gpt()
    if not job.wrong:
        send_weights(model)
    optimizer = ShardedAdam(job, model, 5e-3)
    if job.wrong:
        send_weights(model)
    for step in range(3):
        ids, targets = rows(step, 12)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        optimizer.step()
    job.keep(model.named_parameters())


run(main)
