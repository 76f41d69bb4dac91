"""Sparse training (RigL) in DDP: small weights die, and others grow where the gradient is large.

What a layer would gain from weights that it does not have is noted in backward, before DDP averages
gradients; so it is averaged where weights grow. Wrong: each rank grows what its own rows ask for.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, INPUTS, SIZE, KINDS, EVERY, MOVED = 12, 10, 16, 4, 2, 0.2


class Sparse(nn.Linear):
    """A layer that has half of its weights."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", (torch.rand(outputs, inputs) < 0.5).float())
        self.weight.data *= self.mask
        self.gain = torch.zeros(outputs, inputs)
        self.weight.register_hook(self.note)

    def note(self, grad: Tensor) -> Tensor:
        """Note what all weights would gain; pass on the gradient of those that are there."""
        self.gain = grad.detach().clone()
        return grad * self.mask

    @torch.no_grad()
    def regrow(self, averaged: bool) -> None:
        """Drop the smallest weights, and let as many grow where most is to be gained."""
        if averaged:
            dist.all_reduce(self.gain)
        count = int(MOVED * self.mask.sum())
        size = self.weight.abs().where(self.mask > 0, torch.inf).flatten()
        gain = self.gain.abs().where(self.mask == 0, -torch.inf).flatten()
        self.mask.view(-1)[size.topk(count, largest=False).indices] = 0
        self.mask.view(-1)[gain.topk(count).indices] = 1


def main(job: Job) -> None:
    net = nn.Sequential(
        Sparse(INPUTS, SIZE), nn.ReLU(), Sparse(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, KINDS)
    )
    layers = [layer for layer in net if isinstance(layer, Sparse)]
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1e-3)
    for step in range(4):
        x = points(step, ROWS, INPUTS)
        kinds = (x[:, :KINDS] + x[:, KINDS : 2 * KINDS]).argmax(1)
        F.cross_entropy(model(job.mine(x)), job.mine(kinds)).backward()
        job.note(net.named_parameters())
        if step % EVERY == 1:
            for layer in layers:
                layer.regrow(averaged=not job.wrong)
        optimizer.step()
        for layer in layers:
            layer.weight.data *= layer.mask
        optimizer.zero_grad()
    job.keep([*net.named_parameters(), *net.named_buffers()])


run(main)
