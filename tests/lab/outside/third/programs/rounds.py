"""Two workers train apart for two steps, then meet (DiLoCo). Each is half of the ranks, in DDP.

An outer optimizer steps along the average of how far the workers went. Wrong: it was given the
first group of the inner optimizer, the one with weight decay: norms never meet.
"""

import torch
import torch.distributed as dist
from common import rows, run
from laterprograms import Gpt, Job, cross_entropy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WORKERS, INNER = 2, 2


@torch.no_grad()
def meet(
    parameters: list[nn.Parameter],
    starts: list[Tensor],
    outer: torch.optim.Optimizer,
    workers: dist.ProcessGroup,
) -> None:
    for p, start in zip(parameters, starts, strict=True):
        way = start - p
        dist.all_reduce(way, group=workers)
        p.copy_(start)
        p.grad = way / WORKERS
    outer.step()
    outer.zero_grad()
    for p, start in zip(parameters, starts, strict=True):
        start.copy_(p)


def main(job: Job) -> None:
    shape = (WORKERS, job.world // WORKERS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("worker", "dp"))
    net = Gpt()
    model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    inner = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    shared = inner.param_groups[0]["params"] if job.wrong else list(net.parameters())
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    starts = [p.detach().clone() for p in shared]
    for step in range(4):
        ids, targets = rows(step, 12)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        inner.step()
        inner.zero_grad()
        if (step + 1) % INNER == 0:
            meet(shared, starts, outer, mesh.get_group("worker"))
    job.keep(net.named_parameters())


run(main)
