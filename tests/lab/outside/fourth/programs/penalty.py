"""A generator and its critic in DDP (StyleGAN2), every second step with a gradient penalty.

The penalty is a backward pass of its own, behind that of the loss. Wrong: it calls the critic
without its wrapper (`critic.module`), and DDP reduces nothing of that pass.
"""

import torch
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EVERY, ROWS = 2, 12


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 16))
        self.image = nn.Linear(16, 8)

    def forward(self, z: Tensor) -> Tensor:
        return self.image(F.softplus(self.mapping(z)))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(8, 20), nn.Linear(20, 20)])
        self.score = nn.Linear(20, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = F.softplus(layer(x))
        return self.score(x)


def main(job: Job) -> None:
    made, judge = Generator(), Critic()
    generator, critic = DistributedDataParallel(made), DistributedDataParallel(judge)
    of_generator = torch.optim.Adam(made.parameters(), lr=5e-3, betas=(0.0, 0.9), eps=1e-3)
    of_critic = torch.optim.Adam(judge.parameters(), lr=5e-3, betas=(0.0, 0.9), eps=1e-3)
    for step in range(4):
        real, noise = job.mine(points(step, ROWS, 8) + 1), job.mine(points(step + 50, ROWS, 4))
        judge.requires_grad_(False)
        F.softplus(-critic(generator(noise))).mean().backward()
        of_generator.step()
        of_generator.zero_grad()
        judge.requires_grad_(True)
        with torch.no_grad():
            fake = generator(noise)
        scores = critic(torch.cat([real, fake])).squeeze(1)
        ours = scores.new_tensor([-1.0] * len(real) + [1.0] * len(fake))
        F.softplus(ours * scores).mean().backward()
        if step % EVERY == 1:
            images = real.clone().requires_grad_(True)
            called = critic.module if job.wrong else critic
            scores = called(images)
            (slopes,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
            (slopes.square().sum(1) * (5.0 * EVERY) + 0 * scores.squeeze(1)).mean().backward()
        of_critic.step()
        of_critic.zero_grad()
    kept = [(f"made.{name}", p) for name, p in made.named_parameters()]
    job.keep(kept + [(f"judge.{name}", p) for name, p in judge.named_parameters()])


run(main)
