"""Experts spread over data-parallel ranks, tokens go there by all-to-all (DeepSeek).

Wrong: the loop that averages gradients takes the experts too: each rank has other ones.
"""

import torch
import torch.distributed as dist
from common import WIDTH, Attention, FeedForward, Gpt, Job, average, cross_entropy, rows, run
from torch import Tensor, nn
from torch.autograd import Function

EXPERTS = 4


class Exchange(Function):
    """Send `sent[r]` rows to rank r, receive `received[r]` rows from it; back in backward."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.sizes = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.sizes
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class Mixture(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        every = [FeedForward() for _ in range(EXPERTS)]
        self.world, share = job.world, EXPERTS // job.world
        self.own = range(job.rank * share, (job.rank + 1) * share)
        self.experts = nn.ModuleList(e if i in self.own else None for i, e in enumerate(every))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.gate(tokens).softmax(-1)
        best, chosen = weights.topk(2, -1)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS)
        taken = torch.empty_like(counts)
        dist.all_to_all_single(taken, counts)
        sent = counts.view(self.world, -1).sum(1).tolist()
        received = taken.view(self.world, -1).sum(1).tolist()
        there = Exchange.apply(tokens[order // 2], sent, received)
        pieces = list(there.split(taken.tolist()))
        for place, piece in enumerate(pieces):
            expert = self.experts[self.own[place % len(self.own)]]
            pieces[place] = expert(piece)
        back = Exchange.apply(torch.cat(pieces), received, sent)
        out = torch.zeros_like(tokens).repeat_interleave(2, 0).index_copy(0, order, back)
        return (out.view(len(tokens), 2, -1) * best.unsqueeze(-1)).sum(1).view_as(x)


class Layer(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mixture = Attention(), Mixture(job)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mixture(self.norm_2(x))


def main(job: Job) -> None:
    model = Gpt(0)
    model.blocks = nn.ModuleList(Layer(job) for _ in range(2))
    for layer in model.blocks:
        for expert in layer.mixture.experts:
            for parameter in expert.parameters() if expert is not None else ():
                parameter.is_expert = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(3):
        ids, targets = rows(step, 8)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if hasattr(parameter, "is_expert") and not job.wrong:
                parameter.grad /= job.world
            else:
                average([parameter.grad], job.world)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
