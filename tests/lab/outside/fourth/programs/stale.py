"""Fine-tuning of a classifier with FSDP2: the backbone has a smaller rate than the new head.

Groups of parameters are made of the sharded model. Wrong: the backbone's are listed before
`fully_shard` puts others in their place, and the optimizer moves what the model no longer has.
"""

import torch
import torch.nn.functional as F
from common import points, run
from laterprograms import HEADS, Job
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

PATCHES, WIDE, KINDS = 6, 12, 5


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(8, WIDE)
        self.register_parameter("cls", nn.Parameter(torch.randn(1, 1, WIDE)))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDE, HEADS, 2 * WIDE, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.patch(x)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, 0]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Encoder(), nn.Linear(WIDE, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def main(job: Job) -> None:
    model = Classifier()
    model.backbone.patch.requires_grad_(False)
    backbone = [p for p in model.backbone.parameters() if p.requires_grad]
    if job.world > 1:
        for layer in model.backbone.layers:
            fully_shard(layer)
        fully_shard(model)
    if not job.wrong:
        backbone = [p for p in model.backbone.parameters() if p.requires_grad]
    groups = [{"params": backbone, "lr": 2e-3}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, weight_decay=0.02)
    for step in range(4):
        images = points(step, 12, PATCHES, 8)
        kinds = images.sum((1, 2)).abs().long() % KINDS
        loss = F.cross_entropy(model(job.mine(images)), job.mine(kinds), label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
    job.keep(model.named_parameters())


run(main)
