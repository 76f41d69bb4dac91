"""Low-rank adapters under FSDP2, which leaves the frozen model alone (`ignored_params`).

Separators are new tokens, whose rows are drawn once and never trained. After that a rank seeds
itself by its number, for its dropout and its shuffling. Wrong: it does so before rows are drawn.
"""

import torch
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Gpt, Job, cross_entropy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

NEW, SIZE = 3, 4


class Adapted(nn.Module):
    """A frozen layer and a trained one of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, SIZE, bias=False)
        self.lora_b = nn.Linear(SIZE, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.lora_b(self.lora_a(x))


def enlarged(embed: nn.Embedding) -> nn.Embedding:
    """Return a table with rows for new tokens."""
    drawn = torch.randn(NEW, WIDTH)
    table = nn.Embedding.from_pretrained(torch.cat([embed.weight.detach(), drawn]))
    return table.requires_grad_(False)


def main(job: Job) -> None:
    model = Gpt()
    if job.prepare:
        torch.save(model.state_dict(), job.file)
        return
    model.load_state_dict(torch.load(job.file, weights_only=True))
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.q, block.attention.v = (
            Adapted(block.attention.q),
            Adapted(block.attention.v),
        )
        block.up = Adapted(block.up)
    if job.wrong:
        torch.manual_seed(100 + job.rank)
    model.embed = enlarged(model.embed)
    torch.manual_seed(100 + job.rank)
    frozen = {p for p in model.parameters() if not p.requires_grad}
    if job.world > 1:
        for block in model.blocks:
            fully_shard(block, ignored_params=frozen)
        fully_shard(model, ignored_params=frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2, eps=1e-4)
    for step in range(3):
        ids, targets = rows(step, 12)
        ids[:, 0] = VOCABULARY + torch.arange(12) % NEW
        ids[:, 4] = VOCABULARY + step
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        job.note(model.named_parameters())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(model.named_parameters())


run(main)
