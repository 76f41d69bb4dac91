"""Two RL steps of a worker of verl, as its trainer drives them: `verl_job.py TOOL FOLDER`.

The worker is verl's own extension with its own dispatcher; what it trains is small. Each step reads
log probabilities without gradients, then updates twice. The trainer profiles the second step.
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
import verl
from torch import nn
from verl.utils.profiler import DistProfiler, DistProfilerExtension, ProfilerConfig


class Worker(DistProfilerExtension):
    def __init__(self, tool: str, folder: str) -> None:
        config = ProfilerConfig(
            tool=tool, enable=True, all_ranks=True, save_path=folder, tool_config={}
        )
        rank = dist.get_rank()
        super().__init__(DistProfiler(rank=rank, config=config, save_file_prefix="actor"))
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    @DistProfiler.annotate(role="actor_compute_log_prob")
    def compute_log_prob(self, data: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(data).log_softmax(-1)

    @DistProfiler.annotate(role="actor_update")
    def update_actor(self, data: torch.Tensor, old: torch.Tensor) -> None:
        for part, before in zip(data.chunk(2), old.chunk(2), strict=True):
            ratio = (self.model(part).log_softmax(-1) - before).exp()
            ratio.mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    tool, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    worker = Worker(tool, folder)
    torch.manual_seed(dist.get_rank())
    for number in (1, 2):
        if number == 2:
            worker.start_profile(role="e2e", profile_step=number)
        data = torch.randn(4, 4)
        worker.update_actor(data, worker.compute_log_prob(data))
        if number == 2:
            worker.stop_profile()
    state = worker.model.module.state_dict()
    bits = b"".join(tensor.numpy().tobytes() for tensor in state.values())
    if dist.get_rank() == 0:
        print("verl", verl.__version__, os.environ.get("VERL_USE_EXTERNAL_MODULES", ""))
        print("final", hashlib.sha256(bits).hexdigest())
    del worker
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
