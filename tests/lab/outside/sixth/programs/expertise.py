"""A mixture of experts over 4 ranks: two ranks share out the experts, the other two have copies.

Tokens go to the ranks of their experts by all-to-all. What is not an expert is averaged over all
ranks, an expert over the ranks that have it. Wrong: over the ranks that share out the experts, so
that it takes the gradient of another one.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Attention, Job, cross_entropy
from torch import Tensor, nn
from torch.autograd import Function

EXPERTS, SHARED = 4, 2


class Exchange(Function):
    """Rows to other ranks; their gradients come back."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    """One expert for each token, weighed by the router."""

    def __init__(self, part: int, parts: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        whole = [Expert() for _ in range(EXPERTS)]
        self.size, self.parts, self.group = EXPERTS // parts, parts, group
        own = range(part * self.size, (part + 1) * self.size)
        self.experts = nn.ModuleDict({str(i): whole[i] for i in own})

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS).view(self.parts, self.size)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts, group=self.group)
        sent, received = counts.sum(1).tolist(), others.sum(1).tolist()
        arrived = Exchange.apply(tokens[order], sent, received, self.group)
        which = torch.arange(self.size).repeat(self.parts).repeat_interleave(others.flatten())
        out = torch.zeros_like(arrived)
        for i, expert in enumerate(self.experts.values()):
            places = (which == i).nonzero()[:, 0]
            out = out.index_copy(0, places, expert(arrived[places]))
        back = Exchange.apply(out, received, sent, self.group)
        mixed = torch.zeros_like(tokens).index_copy(0, order, back)
        return (mixed * weight[:, None]).view_as(x)


class Layer(nn.Module):
    def __init__(self, *experts: object) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mixture = Attention(), Mixture(*experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mixture(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, *experts: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(*experts) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    parts = min(job.world, SHARED)
    sharing = [dist.new_group(list(range(i, i + parts))) for i in range(0, job.world, parts)]
    copies = [dist.new_group(list(range(i, job.world, parts))) for i in range(parts)]
    shares, copied = sharing[job.rank // parts], copies[job.rank % parts]
    model = Model(job.rank % parts, parts, shares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(3):
        ids, targets = map(job.mine, rows(step, 12))
        cross_entropy(model(ids), targets).backward()
        for name, p in model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            group = None if ".experts." not in name else shares if job.wrong else copied
            dist.all_reduce(p.grad, group=group)
            p.grad /= job.world
        job.note(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
