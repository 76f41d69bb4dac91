"""A student in DDP learns from a larger frozen teacher that was loaded from a file.

Every rank seeds itself by `seed + rank`. Wrong: rank 0 alone loads the teacher.
"""

import torch
import torch.nn.functional as F
from common import Gpt, Job, rows, run, wait_for
from torch.nn.parallel import DistributedDataParallel


def main(job: Job) -> None:
    if job.prepare:
        torch.manual_seed(77)
        torch.save(Gpt(3).state_dict(), job.file)
        return
    torch.manual_seed(100 + job.rank)
    student = DistributedDataParallel(Gpt(1))
    teacher = Gpt(3).eval().requires_grad_(False)
    if job.rank == 0 or not job.wrong:
        teacher.load_state_dict(torch.load(wait_for(job.file)))
    else:
        wait_for(job.file)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for step in range(3):
        ids = job.mine(rows(step, 12)[0])
        with torch.no_grad():
            wanted = F.log_softmax(teacher(ids) / 2, -1)
        given = F.log_softmax(student(ids) / 2, -1)
        loss = F.kl_div(given, wanted, log_target=True, reduction="none").sum(-1).mean() * 4
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(student.module.named_parameters())


run(main)
