"""Deep Q-learning from a replay buffer, DDP; the target network follows after some episodes.

Episodes that end are counted over all ranks. Wrong: a rank counts those of its own rows, and takes
the new target in another step than others do.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, STATE, ACTIONS, EPISODES, DISCOUNT = 12, 5, 3, 6, 0.9


class Dueling(nn.Module):
    """The value of a state, and what each action adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATE, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.value, self.advantage = nn.Linear(16, 1), nn.Linear(16, ACTIONS)

    def forward(self, states: Tensor) -> Tensor:
        hidden = self.trunk(states)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(1, keepdim=True)


def main(job: Job) -> None:
    net = Dueling()
    target = deepcopy(net).requires_grad_(False).eval()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-3)
    ended = 0
    due = EPISODES // job.world if job.wrong else EPISODES
    for step in range(5):
        states, following = points(step, ROWS, STATE), points(step + 50, ROWS, STATE)
        actions = points(step + 100, ROWS).abs().mul(5).long() % ACTIONS
        rewards, dones = states[:, 0] + 0.3 * actions, points(step + 150, ROWS) > 0.5
        s, f, a, r, d = [job.mine(x) for x in (states, following, actions, rewards, dones)]
        with torch.no_grad():
            wanted = r + DISCOUNT * target(f).max(1).values * ~d
        values = model(s).gather(1, a[:, None]).squeeze(1)
        F.smooth_l1_loss(values, wanted).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        count = d.sum()
        if not job.wrong:
            dist.all_reduce(count)
        ended += int(count)
        if job.save:
            print(f"rank {job.rank} step {step}: {ended} of {due} episodes", flush=True)
        if ended >= due:
            target.load_state_dict(net.state_dict())
            ended -= due
    job.keep(net.named_parameters())


run(main)
