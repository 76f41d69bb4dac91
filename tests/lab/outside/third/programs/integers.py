"""DDP with a communication hook that sums gradients as integers, as switches do (SwitchML).

Ranks agree on the largest element of a bucket, which gives the scale. Wrong: each rank takes its
own largest element, and divides the sum by its own scale.
"""

import torch
import torch.distributed as dist
from common import rows, run
from laterprograms import Gpt, Job, cross_entropy
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

LARGEST = 2.0**30


def sum_as_integers(job: Job, bucket: dist.GradBucket) -> Future[Tensor]:
    grads = bucket.buffer()
    largest = grads.abs().max().double()
    if not job.wrong:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    scale = LARGEST / (largest * job.world).clamp(min=1e-30)
    whole = (grads.double() * scale).round().int()

    def back(future: Future[list[Tensor]]) -> Tensor:
        return (future.value()[0].double() / (scale * job.world)).to(grads.dtype)

    return dist.all_reduce(whole, async_op=True).get_future().then(back)


def main(job: Job) -> None:
    model = DistributedDataParallel(Gpt(), gradient_as_bucket_view=True)
    model.register_comm_hook(job, sum_as_integers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    for step in range(4):
        ids, targets = rows(step, 12)
        loss = cross_entropy(model(job.mine(ids)), job.mine(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if job.rank == 0 and job.save:
            print(f"step {step} loss {shown.item() / job.world:.4f}", flush=True)
    job.keep(model.module.named_parameters())


run(main)
