"""A small image network in DDP, two epochs of a `DistributedSampler` that shuffles.

The sampler is told of each epoch. Wrong: nobody calls `set_epoch`, and the second epoch has the
batches of the first.
"""

import torch
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IMAGES, BATCH, KINDS = 24, 12, 4


class Residual(nn.Module):
    """Two convolutions beside a way past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)
        self.past = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.past(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.enter(x)).mean((2, 3)))


def main(job: Job) -> None:
    images = points(0, IMAGES, 3, 6, 6)
    data = TensorDataset(images, images.mean((2, 3)).argmax(1))
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, BATCH // job.world, sampler=sampler, drop_last=True)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(2):
        if not job.wrong:
            sampler.set_epoch(epoch)
        model.train()
        for x, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels, label_smoothing=0.1).backward()
            job.note(net.named_parameters())
            optimizer.step()
    job.keep(net.named_parameters())


run(main)
