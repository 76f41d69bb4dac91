"""A denoiser under FSDP2 in bfloat16: the network is small, times count from 0 to 999.

Times become cosines and sines in float32, then they are rounded. FSDP2 rounds what a module is
called with, unless it is told not to. Wrong: it is not told, and bfloat16 has no number between 512
and 516.
"""

import math

import torch
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SIZE, WIDE, ROWS = 6, 32, 12


class Timesteps(nn.Module):
    """The cosines and sines of a time, at several speeds."""

    def forward(self, times: Tensor) -> Tensor:
        speeds = torch.exp(-math.log(10_000) * torch.arange(WIDE // 2) / (WIDE // 2))
        angles = times[:, None].float() * speeds
        return torch.cat([angles.cos(), angles.sin()], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shift = nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE)
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x) + self.shift(time))))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.timesteps = Timesteps()
        self.time = nn.Sequential(nn.Linear(WIDE, WIDE), nn.SiLU(), nn.Linear(WIDE, WIDE))
        self.enter, self.leave = nn.Linear(SIZE, WIDE), nn.Linear(WIDE, SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        dtype = self.enter.weight.dtype
        time = self.time(self.timesteps(times).to(dtype))
        x = self.enter(x.to(dtype))
        for layer in self.layers:
            x = layer(x, time)
        return self.leave(x).float()


def main(job: Job) -> None:
    model = Denoiser()
    mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=job.wrong
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(3):
        data, noise = points(step, ROWS, SIZE) * 0.3 + 1, points(step + 50, ROWS, SIZE)
        times = points(step + 100, ROWS).sigmoid().mul(999).floor()
        kept = torch.cos(times / 1000 * math.pi / 2)[:, None]
        mixed = kept * data + (1 - kept**2).sqrt() * noise
        loss = (model(job.mine(mixed), job.mine(times)) - job.mine(noise)).square().mean()
        loss.backward()
        job.note(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
