"""Muon shared out: each rank makes the update of its matrices, all gather them (modded-nanogpt).

There are 13 matrices for two ranks. Wrong: only full rounds are gathered.
"""

import torch
import torch.distributed as dist
from common import Gpt, Job, average, cross_entropy, rows, run
from torch import Tensor


def orthogonal(x: Tensor) -> Tensor:
    """Newton-Schulz: the nearest matrix with orthogonal rows."""
    turned = x.shape[0] > x.shape[1]
    y = (x.T if turned else x) / (x.norm() + 1e-7)
    for _ in range(5):
        square = y @ y.T
        y = 3.4445 * y + (-4.775 * square + 2.0315 * square @ square) @ y
    return y.T if turned else y


class Muon(torch.optim.Optimizer):
    def __init__(self, params: list[Tensor], job: Job, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.job = job

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        params, world = self.param_groups[0]["params"], self.job.world
        for first in range(0, len(params), world):
            group = params[first : first + world]
            updates = [torch.zeros_like(p) for p in group]
            if self.job.rank < len(group):
                p = group[self.job.rank]
                kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
                kept.lerp_(p.grad, 0.1)
                updates[self.job.rank] = orthogonal(p.grad.lerp(kept, 0.9))
            if len(group) == world or not self.job.wrong:
                for owner, update in enumerate(updates):
                    update = update.contiguous()
                    dist.broadcast(update, owner)
                    updates[owner] = update
            for p, update in zip(group, updates, strict=True):
                p.sub_(self.param_groups[0]["lr"] * update)


def main(job: Job) -> None:
    model = Gpt()
    inside = [p for n, p in model.named_parameters() if p.dim() == 2 and "position" not in n]
    matrices = [p for p in inside if p is not model.embed.weight]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [Muon(matrices, job), torch.optim.AdamW(others, lr=1e-2)]
    for step in range(3):
        ids, targets = rows(step, 8)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        average([p.grad for p in model.parameters()], job.world)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
