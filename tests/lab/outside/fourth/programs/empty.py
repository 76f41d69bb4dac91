"""FSDP2 goes on from a checkpoint that rank 0 alone reads; the other ranks begin on `meta`.

The checkpoint has no rotary frequencies, which are no part of the state; each rank has to compute
them. Wrong: it is left out, and all ranks but the first keep the zeros of their empty model.
"""

import torch
import torch.nn.functional as F
from common import rows, run
from laterprograms import HEADS, LENGTH, VOCABULARY, WIDTH, Job, cross_entropy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

SIZE = WIDTH // HEADS


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        return 100.0 ** -(torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE)

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(length), self.inv_freq).repeat(1, 2)
        return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(VOCABULARY, WIDTH), Rotary()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, (cos, sin) = self.embed(ids), self.rotary(ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def materialised(model: Decoder) -> None:
    """Give a model on `meta` memory, all zeros."""
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()


def main(job: Job) -> None:
    if job.prepare:
        torch.save(Decoder().state_dict(), job.file)
        return
    with torch.device("cpu" if job.rank == 0 else "meta"):
        model = Decoder()
    state = torch.load(job.file, weights_only=True) if job.rank == 0 else {}
    if job.world == 1:
        model.load_state_dict(state)
    else:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        if job.rank > 0:
            materialised(model)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    if not job.wrong:
        model.rotary.inv_freq = model.rotary.frequencies()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(3):
        ids, targets = rows(step, 12, LENGTH)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
