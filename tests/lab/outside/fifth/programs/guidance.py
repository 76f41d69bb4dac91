"""A diffusion transformer, tensor-parallel by DTensor; some labels are left out (guidance).

All ranks draw alike which labels are left out. Wrong: they draw with the seed of their rank, which
is right where ranks have rows of their own: here the ranks of one model see other labels.
"""

import torch
import torch.nn.functional as F
from common import points, run
from laterprograms import HEADS, WIDTH, Job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROWS, PATCHES, SIZE, KINDS, LEFT_OUT = 8, 6, 5, 7, 0.4


class Labels(nn.Module):
    """The vector of each label, that of no label for some."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.table = nn.Embedding(KINDS + 1, WIDTH)
        self.draws = torch.Generator().manual_seed(seed)

    def forward(self, labels: Tensor) -> Tensor:
        gone = torch.rand(len(labels), generator=self.draws) < LEFT_OUT
        return self.table(labels.masked_fill(gone, KINDS))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v)]
        q, k, v = [part.transpose(1, 2) for part in parts]
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a feed-forward part, scaled and shifted by the condition (adaLN)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention, self.modulation = Attention(), nn.Linear(WIDTH, 4 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(F.silu(condition))[:, None].chunk(4, -1)
        x = x + self.attention(self.norm_1(x) * (1 + parts[0]) + parts[1])
        return x + self.down(F.gelu(self.up(self.norm_2(x) * (1 + parts[2]) + parts[3])))


class Denoiser(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, SIZE)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.labels = Labels(seed)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        condition = self.time(times) + self.labels(labels)
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, condition)
        return self.leave(x)


def main(job: Job) -> None:
    model = Denoiser(33 + job.rank if job.wrong else 33)
    if job.world > 1:
        mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("tp",))
        plan = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        for layer in model.layers:
            parallelize_module(layer, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4, weight_decay=0)
    for step in range(3):
        data, noise = points(step, ROWS, PATCHES, SIZE), points(step + 50, ROWS, PATCHES, SIZE)
        times = points(step + 100, ROWS, 1).sigmoid()
        labels = points(step + 150, ROWS).abs().mul(10).long() % KINDS
        mixed = (1 - times[:, None]) * data + times[:, None] * noise
        (model(mixed, times, labels) - noise).square().mean().backward()
        job.note(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
