"""Speech with CTC in DDP. Wrong: an utterance too short for its text has an infinite loss."""

import torch
from common import Job, points, run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FRAMES, LETTERS, LONGEST = 16, 8, 10


class Recognizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(4, 12, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(12)
        self.memory = nn.GRU(12, 12, batch_first=True, bidirectional=True)
        self.letters = nn.Linear(24, LETTERS)

    def forward(self, sounds: Tensor) -> Tensor:
        x = self.norm(self.front(sounds).transpose(1, 2)).relu()
        return self.letters(self.memory(x)[0]).log_softmax(-1)


def texts(step: int, count: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step + 300)
    letters = torch.randint(1, LETTERS, (count, LONGEST), generator=drawn)
    lengths = torch.randint(2, 4, (count,), generator=drawn)
    if step == 1:
        lengths[count // 2] = LONGEST
    return letters, lengths


def main(job: Job) -> None:
    model = DistributedDataParallel(Recognizer())
    loss_of = nn.CTCLoss(zero_infinity=not job.wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(3):
        sounds = job.mine(points(step, 6, 4, FRAMES))
        letters, lengths = [job.mine(t) for t in texts(step, 6)]
        given = model(sounds).transpose(0, 1)
        frames = torch.full((len(sounds),), len(given))
        loss_of(given, letters, frames, lengths).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.module.named_parameters())


run(main)
