"""Policy gradients with a frozen reference policy; advantages are whitened over all ranks (TRL).

Wrong: each rank whitens its own.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from common import Gpt, Job, rows, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PROMPT, NEW, COUNT = 4, 4, 8


class PolicyLoss(nn.Module):
    def forward(self, now: Tensor, old: Tensor, base: Tensor, advantages: Tensor) -> Tensor:
        ratio = (now - old).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        apart = (base - now).exp() - (base - now) - 1
        return (0.1 * apart - gain).mean()


def chances(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probability of each new token, `[rows, NEW]`."""
    given = model(ids[:, :-1]).log_softmax(-1)[:, PROMPT - 1 :]
    return given.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


def main(job: Job) -> None:
    policy = Gpt()
    base = deepcopy(policy).requires_grad_(False).eval()
    model, loss_of = DistributedDataParallel(policy), PolicyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        ids = job.mine(rows(step, COUNT, PROMPT)[0])
        with torch.no_grad():
            for place in range(NEW):
                seed = torch.Generator().manual_seed(1000 + 10 * step + place)
                noise = -torch.empty(COUNT, 32).exponential_(generator=seed).log()
                best = (policy(ids)[:, -1] + job.mine(noise)).argmax(-1)
                ids = torch.cat([ids, best[:, None]], 1)
            old, of_base = chances(policy, ids), chances(base, ids)
        reward = (ids[:, PROMPT:] % 2 == 0).float().sum(1) + 0.1 * ids[:, -1]
        sums = torch.stack([reward.sum(), reward.square().sum(), torch.tensor(float(len(ids)))])
        if not job.wrong:
            dist.all_reduce(sums)
        mean = sums[0] / sums[2]
        spread = (sums[1] / sums[2] - mean.square()).sqrt()
        advantages = ((reward - mean) / (spread + 1e-4))[:, None]
        loss_of(chances(model, ids), old, of_base, advantages).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(policy.named_parameters())


run(main)
