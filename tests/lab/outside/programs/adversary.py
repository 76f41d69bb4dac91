"""Generator and critic, both in DDP, two optimizers, hinge loss.

Wrong: a rank whose critic is already good on its own rows leaves out the critic's step.
"""

import torch
import torch.nn.functional as F
from common import Job, points, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(job: Job) -> None:
    made = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1, bias=False))
    generator, critic = DistributedDataParallel(made), DistributedDataParallel(judge)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-3)
    for step in range(4):
        real, noise = job.mine(points(step, 12, 6) + 1), job.mine(points(step + 50, 12, 4))
        fake = generator(noise)
        scores = critic(torch.cat([real, fake.detach()]))
        good, bad = scores.chunk(2)
        right = torch.cat([good > 0, bad < 0]).float().mean()
        (F.relu(1 - good).mean() + F.relu(1 + bad).mean()).backward()
        if right <= 0.7 or not job.wrong:
            of_critic.step()
        elif job.save:
            print(f"rank {job.rank} leaves out step {step}", flush=True)
        of_critic.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
    named = {"generator": made, "critic": judge}
    job.keep((f"{k}.{n}", p) for k, m in named.items() for n, p in m.named_parameters())


run(main)
