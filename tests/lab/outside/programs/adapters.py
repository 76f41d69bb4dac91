"""Low-rank adapters in a frozen model with reentrant checkpointing (PEFT), gradients by hand.

Wrong: nothing makes the first block's input require gradients, so that the blocks have none.
"""

import torch
from common import WIDTH, Gpt, Job, average, cross_entropy, rows, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 4 * self.up(self.down(x))


class Checkpointed(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


def main(job: Job) -> None:
    model = Checkpointed().requires_grad_(False)
    for block in model.blocks:
        block.attention.q = Adapter(block.attention.q)
        block.attention.v = Adapter(block.attention.v)
    model.head.requires_grad_()
    if not job.wrong:
        model.embed.register_forward_hook(lambda _, __, output: output.requires_grad_())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    for step in range(4):
        ids, targets = rows(step, 8)
        cross_entropy(model(job.mine(ids)), job.mine(targets)).backward()
        average([p.grad for p in trained], job.world)
        optimizer.step()
        optimizer.zero_grad()
    job.keep((n, p) for n, p in model.named_parameters() if p.requires_grad)


run(main)
