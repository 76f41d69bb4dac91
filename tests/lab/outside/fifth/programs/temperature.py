"""Soft actor-critic from a replay buffer; actor and critics in DDP, the temperature is learned too.

The temperature is a module of one number without a wrapper, whose gradient is averaged by hand.
Wrong: nobody does, as it is small and is not in DDP.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, STATE, ACTION, WIDE, DISCOUNT = 12, 5, 2, 24, 0.95


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(STATE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU()
        )
        self.mean, self.log_std = nn.Linear(WIDE, ACTION), nn.Linear(WIDE, ACTION)

    def forward(self, states: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(states)
        log_std = self.log_std(hidden).tanh()
        raw = self.mean(hidden) + log_std.exp() * noise
        actions = raw.tanh()
        chance = -0.5 * noise.square() - log_std - (1 - actions.square() + 1e-6).log()
        return actions, chance.sum(1, keepdim=True)


class Critics(nn.Module):
    """Two estimates of what an action is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.q_1, self.q_2 = (
            nn.Sequential(
                *(nn.Linear(STATE + ACTION, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU()),
                nn.Linear(WIDE, 1),
            )
            for _ in range(2)
        )

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([states, actions], 1)
        return torch.cat([self.q_1(x), self.q_2(x)], 1)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([-1.0]))

    def forward(self) -> Tensor:
        return self.log_alpha.exp()


def main(job: Job) -> None:
    actor_net, critic_net, temperature = Actor(), Critics(), Temperature()
    target = deepcopy(critic_net).requires_grad_(False)
    actor, critics = DistributedDataParallel(actor_net), DistributedDataParallel(critic_net)
    to_learn = (critic_net, actor_net, temperature)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in to_learn]
    for step in range(3):
        draws = [points(step + 50 * i, ROWS, n) for i, n in enumerate((STATE, STATE, ACTION))]
        states, after, actions = [job.mine(x) for x in draws]
        noise, later = [job.mine(points(step + 50 * i, ROWS, ACTION)) for i in (3, 4)]
        actions = actions.tanh()
        rewards = states[:, :1] - actions.square().sum(1, keepdim=True)
        with torch.no_grad():
            next_actions, chance = actor_net(after, later)
            worth = target(after, next_actions).min(1, keepdim=True).values
            wanted = rewards + DISCOUNT * (worth - temperature.log_alpha.exp() * chance)
        optimizers[0].zero_grad()
        F.mse_loss(critics(states, actions), wanted.expand(-1, 2)).backward()
        job.note((f"critics.{name}", p) for name, p in critic_net.named_parameters())
        optimizers[0].step()

        optimizers[1].zero_grad()
        critic_net.requires_grad_(False)
        chosen, chance = actor(states, noise)
        worth = critic_net(states, chosen).min(1, keepdim=True).values
        (temperature.log_alpha.exp().detach() * chance - worth).mean().backward()
        critic_net.requires_grad_(True)
        job.note((f"actor.{name}", p) for name, p in actor_net.named_parameters())
        optimizers[1].step()

        optimizers[2].zero_grad()
        (temperature() * (ACTION - chance.detach())).mean().backward()
        if not job.wrong:
            dist.all_reduce(temperature.log_alpha.grad)
            temperature.log_alpha.grad /= job.world
        job.note(temperature.named_parameters())
        optimizers[2].step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), critic_net.parameters(), strict=True):
                old.lerp_(new, 0.05)
    everything = (actor_net, critic_net, target, temperature)
    job.keep(
        (f"{i}.{name}", p) for i, m in enumerate(everything) for name, p in m.named_parameters()
    )


run(main)
