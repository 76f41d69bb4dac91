"""Flow matching (SD3, Flux): a network learns the way from noise to data, FSDP2.

Times and noise are drawn for all rows of a batch, and a rank takes those of its own. Wrong: a rank
draws them for its own rows alone, from a generator that is seeded alike everywhere, so that all
ranks learn the same times with the same noise.
"""

import math

import torch
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

SIZE, WIDE, ROWS = 6, 24, 12


class Layer(nn.Module):
    """A residual layer that time scales and shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE, elementwise_affine=False)
        self.modulation = nn.Linear(WIDE, 2 * WIDE)
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.modulation(time).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x) * (1 + scale) + shift)))


class Velocity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(SIZE, WIDE), nn.Linear(WIDE, SIZE)
        self.time = nn.Sequential(nn.Linear(WIDE, WIDE), nn.SiLU())
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        frequencies = torch.exp(-math.log(1000) * torch.arange(WIDE // 2) / (WIDE // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        angles = 100 * times[:, None] * self.frequencies
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, time)
        return self.leave(x)


def main(job: Job) -> None:
    model = Velocity()
    if job.world > 1:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    draws = torch.Generator().manual_seed(11)
    for step in range(4):
        data = job.mine(points(step, ROWS, SIZE) * 0.5 + 1)
        count = ROWS // job.world if job.wrong else ROWS
        times = torch.randn(count, generator=draws).sigmoid()
        noise = torch.randn(count, SIZE, generator=draws)
        if not job.wrong:
            times, noise = job.mine(times), job.mine(noise)
        mixed = (1 - times[:, None]) * data + times[:, None] * noise
        loss = (model(mixed, times) - (noise - data)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
