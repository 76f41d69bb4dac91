"""A trunk with two heads, trained on two tasks; gradients are summed while backward goes on.

Hooks start a sum as soon as a gradient is there, in one fixed order. The order of tasks in a batch
is that of the file which a rank reads. Wrong: hooks start sums in the order in which they are
called, so that ranks add the gradient of one head to that of the other.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn

TASKS = ("topic", "tone")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.heads = nn.ModuleDict({task: nn.Linear(16, 4) for task in TASKS})

    def forward(self, x: Tensor, tasks: list[str]) -> dict[str, Tensor]:
        hidden = self.trunk(x)
        return {task: self.heads[task](hidden) for task in tasks}


class Reducer:
    """It averages each gradient over ranks, at the side of the backward pass."""

    def __init__(self, job: Job, parameters: list[nn.Parameter]) -> None:
        self.job, self.order = job, parameters[::-1]
        self.ready, self.running = set(), []
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.on_grad)

    def on_grad(self, p: nn.Parameter) -> None:
        if self.job.wrong:
            self.start(p)
            return
        self.ready.add(p)
        while len(self.running) < len(self.order) and self.order[len(self.running)] in self.ready:
            self.start(self.order[len(self.running)])

    def start(self, p: nn.Parameter) -> None:
        p.grad /= self.job.world
        self.running.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self) -> None:
        for work in self.running:
            work.wait()
        self.ready, self.running = set(), []


def main(job: Job) -> None:
    model = Net()
    reducer = Reducer(job, list(model.parameters()))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, eps=1e-4)
    weights = {"topic": 1.0, "tone": 0.5}
    for step in range(4):
        x = points(step, 12, 10)
        labels = {task: points(step + 100 * (i + 1), 12) for i, task in enumerate(TASKS)}
        tasks = list(TASKS) if (job.rank + step) % 2 == 0 else list(TASKS)[::-1]
        answers = model(job.mine(x), tasks)
        loss = torch.zeros(())
        for task, logits in answers.items():
            label = (job.mine(labels[task]).abs() * 3).long() % 4
            loss = loss + weights[task] * F.cross_entropy(logits, label)
        loss.backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
