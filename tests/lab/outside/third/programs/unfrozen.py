"""Fine-tuning of a small image network: first its head, from the third step on its last stage too.

Plain DDP, label smoothing, a cosine schedule. Wrong: the model is wrapped once, while the stage is
still frozen, and DDP reduces only what required gradients then.
"""

import torch
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(3, 6), Stage(6, 6), Stage(6, 8)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(steps), eta_min=1e-3)
    for step in steps:
        images = points(step, 12, 3, 6, 6)
        labels = points(step + 500, 12).abs().mul(3).long() % 5
        loss = F.cross_entropy(model(job.mine(images)), job.mine(labels), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def main(job: Job) -> None:
    net = Net()
    net.stages.requires_grad_(False)
    model = DistributedDataParallel(net)
    train(job, model, torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9), range(2))
    net.stages[-1].requires_grad_(True)
    if not job.wrong:
        model = DistributedDataParallel(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    train(job, model, torch.optim.SGD(trained, lr=0.05, momentum=0.9), range(2, 5))
    job.keep(net.named_parameters())


run(main)
