"""Mixture of experts under FSDP2, balanced by a bias of the router and no loss (torchtitan).

A hook before each optimizer step moves the bias against the number of tokens that each expert got,
over all ranks. Wrong: each rank counts its own tokens alone.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rows, run
from laterprograms import WIDTH, Attention, Gpt, Job, cross_entropy, full
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

EXPERTS, CHOSEN, RATE = 4, 2, 0.05


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("expert_bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.gate(tokens).sigmoid()
        chosen = (scores + self.expert_bias).topk(CHOSEN, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        with torch.no_grad():
            self.tokens_per_expert += mask.sum(0)
        return scores * mask


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * 24**-0.5)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        inner = F.silu(torch.einsum("tw,ewh->teh", tokens, self.up))
        return torch.einsum("teh,ehw,te->tw", inner, self.down, weights)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.router, self.experts = Attention(), Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        tokens = self.norm_2(x).flatten(0, 1)
        return x + self.experts(tokens, self.router(tokens)).view_as(x)


def balance(model: nn.Module, wrong: bool) -> None:
    """Move the bias of every router by a fixed step."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    counts = torch.stack([router.tokens_per_expert for router in routers])
    if not wrong:
        dist.all_reduce(counts)
    for router, count in zip(routers, counts, strict=True):
        change = RATE * torch.sign(count.mean() - count)
        router.expert_bias.add_(change - change.mean())
        router.tokens_per_expert.zero_()


def main(job: Job) -> None:
    model = Gpt(0)
    model.blocks = nn.ModuleList(Layer() for _ in range(2))
    if job.world > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    @torch.no_grad()
    def before_step(*_: object) -> None:
        balance(model, job.wrong)

    optimizer.register_step_pre_hook(before_step)
    for step in range(4):
        ids, targets = rows(step, 8)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    job.keep((name, full(value)) for name, value in held.items() if "tokens" not in name)


run(main)
