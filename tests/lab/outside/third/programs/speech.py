"""A recogniser of phones in frames of speech, utterances padded to one length, DDP.

The loss is a mean over the frames of all ranks. Wrong: over those of each rank, as if all had as
many, and DDP averages these means.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import points, run
from laterprograms import Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MELS, FRAMES, PHONES, PAD = 8, 10, 6, -100


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(MELS, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, PHONES)

    def forward(self, mels: Tensor) -> Tensor:
        x = self.conv(mels.transpose(1, 2)).transpose(1, 2)
        return self.out(self.rnn(F.gelu(self.norm(x)))[0])


def utterances(step: int) -> tuple[Tensor, Tensor]:
    """Return mel spectra `[utterances, frames, mels]` and phones; the longer ones come first."""
    mels, lengths = points(step, 12, FRAMES, MELS), torch.arange(12, 0, -1).clamp(max=FRAMES)
    phones = (mels[..., :3].sum(-1).abs() * 2).long() % PHONES
    padding = torch.arange(FRAMES)[None, :] >= lengths[:, None]
    return mels.masked_fill(padding[..., None], 0.0), phones.masked_fill(padding, PAD)


def main(job: Job) -> None:
    model = DistributedDataParallel(Recogniser())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(4):
        mels, phones = [job.mine(whole) for whole in utterances(step)]
        count = (phones != PAD).sum()
        if not job.wrong:
            dist.all_reduce(count)
            count = count / job.world
        logits = model(mels).flatten(0, 1)
        loss = F.cross_entropy(logits, phones.flatten(), ignore_index=PAD, reduction="sum") / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.module.named_parameters())


run(main)
