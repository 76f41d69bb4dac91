"""DiLoCo: two islands train by themselves, an outer optimizer joins them every two steps.

Inside an island ranks are in DDP; the reference has one rank an island. Wrong: what the islands
did is averaged over the ranks of one island, which agree already.
"""

import torch
import torch.distributed as dist
from common import Gpt, Job, cross_entropy, rows, run
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def main(job: Job) -> None:
    mesh = init_device_mesh("cpu", (2, job.world // 2), mesh_dim_names=("island", "inner"))
    island, inside = mesh.get_local_rank("island"), mesh.get_local_rank("inner")
    model = DistributedDataParallel(Gpt(), process_group=mesh.get_group("inner"))
    params = list(model.parameters())
    inner = torch.optim.AdamW(params, lr=5e-3)
    outer = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)
    start = [p.detach().clone() for p in params]
    group = mesh.get_group("inner" if job.wrong else "island")
    for step in range(4):
        ids, targets = [job.mine(t, 2, island) for t in rows(step, 16)]
        ids, targets = [job.mine(t, mesh.size(1), inside) for t in (ids, targets)]
        cross_entropy(model(ids), targets).backward()
        inner.step()
        inner.zero_grad()
        if step % 2 == 1:
            with torch.no_grad():
                for p, old in zip(params, start, strict=True):
                    p.grad = old - p
                    dist.all_reduce(p.grad, group=group)
                    p.grad /= dist.get_world_size(group)
                    p.copy_(old)
            outer.step()
            outer.zero_grad()
            start = [p.detach().clone() for p in params]
    job.keep(model.module.named_parameters())


run(main)
