"""Spoken words: a pipeline of two stages (GPipe) in two replicas, 2 x 2 ranks.

Gradients of a stage are averaged over its replicas when all micro-batches are through. Wrong: this
stands where the loss is printed, which only the last stage knows.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

ROWS, BANDS, FRAMES, SIZE, WORDS, MICRO = 12, 8, 16, 16, 5, 3


class Front(nn.Module):
    """Frames of a spectrum become half as many vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv1d(BANDS, SIZE, 3, padding=1)
        self.stride = nn.Conv1d(SIZE, SIZE, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stride(F.gelu(self.narrow(x))).mT)


class Back(nn.Module):
    """A layer of a transformer, and the word."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            SIZE, 2, 2 * SIZE, dropout=0.0, batch_first=True, norm_first=True
        )
        self.word = nn.Linear(SIZE, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.word(self.layer(x).mean(1))


class Stage(nn.Module):
    """One part of the model or both, under the names that they have in the whole."""

    def __init__(self, front: Front | None, back: Back | None) -> None:
        super().__init__()
        self.front, self.back = front, back

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.front is None else self.front(x)
        return x if self.back is None else self.back(x)


def smoothed(words: Tensor, truth: Tensor) -> Tensor:
    return F.cross_entropy(words, truth, label_smoothing=0.1)


def average(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad, group=replicas)
        p.grad /= dist.get_world_size(replicas)


def main(job: Job) -> None:
    front, back = Front(), Back()
    if job.world > 1:
        mesh = init_device_mesh("cpu", (2, job.world // 2), mesh_dim_names=("pp", "dp"))
        at, replica = mesh.get_coordinate()
        model = Stage(None if at else front, back if at else None)
        stage = PipelineStage(model, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = ScheduleGPipe(stage, MICRO, loss_fn=smoothed)
    else:
        model = Stage(front, back)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
    for step in range(3):
        x = points(step, ROWS, BANDS, FRAMES)
        truth = x.mean(2)[:, :WORDS].argmax(1)
        if job.world == 1:
            smoothed(model(x), truth).backward()
        else:
            losses = []
            if at == 0:
                schedule.step(job.mine(x, 2, replica))
            else:
                schedule.step(target=job.mine(truth, 2, replica), losses=losses)
            if losses or not job.wrong:
                average(model, mesh.get_group("dp"))
            if losses and job.save:
                print(f"step {step}: loss {torch.stack(losses).mean():.3f}")
        job.note(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
