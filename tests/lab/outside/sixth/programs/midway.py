"""A mixer of image patches in DDP goes on in the middle of an epoch (`DistributedSampler`).

The checkpoint counts rows that were seen, by all ranks. Batches are left out up to there. Wrong:
each rank leaves out as many rows by itself, and all go on too late in the epoch.
"""

from itertools import islice

import torch
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROWS, BATCH, PATCHES, POINTS, SIZE, KINDS = 156, 12, 4, 9, 12, 4


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(POINTS, SIZE)
        self.norm_1, self.norm_2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.patches, self.channels = nn.Linear(PATCHES, PATCHES), nn.Linear(SIZE, SIZE)
        self.kinds = nn.Linear(SIZE, KINDS)

    def forward(self, images: Tensor) -> Tensor:
        x = self.enter(images)
        x = x + F.gelu(self.patches(self.norm_1(x).mT)).mT
        x = x + F.gelu(self.channels(self.norm_2(x)))
        return self.kinds(x.mean(1))


def main(job: Job) -> None:
    images = points(0, ROWS, PATCHES, POINTS)
    data = TensorDataset(images, images.mean(2).argmax(1))
    sampler = DistributedSampler(data, job.world, job.rank, shuffle=True, seed=5)
    sampler.set_epoch(1)
    size = BATCH // job.world
    loader = DataLoader(data, size, sampler=sampler)
    net = Mixer()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    seen = 0
    if not job.prepare:
        saved = torch.load(job.file, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        seen = saved["seen"]
    done = seen // size if job.wrong else seen // BATCH
    for batch, kinds in islice(loader, done, done + 3):
        F.cross_entropy(model(batch), kinds, label_smoothing=0.1).backward()
        job.note(net.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
        seen += BATCH
    if job.prepare:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "seen": seen}
        torch.save(state, job.file)
    job.keep(net.named_parameters())


run(main)
