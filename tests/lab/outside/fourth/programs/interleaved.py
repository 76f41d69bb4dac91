"""A pipeline of two ranks with two stages each (interleaved 1F1B), from a checkpoint of all layers.

Rank 0 has stages 0 and 2, rank 1 has 1 and 3, one layer in each. Wrong: what a stage reads is
counted as if each rank had stages that follow each other: layers 1 and 2 have each other's weights.
"""

import torch
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Block, Job, cross_entropy
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

LAYERS, MICRO = 4, 4


class Stage(nn.Module):
    """Some layers, under the names that they have in the whole model."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.first, self.last = 0 in layers, LAYERS - 1 in layers
        if self.first:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in layers})
        if self.last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.last else x

    def read(self, state: dict[str, Tensor], renamed: dict[int, int]) -> None:
        """Take what the checkpoint holds of these layers."""
        for own, other in renamed.items():
            layer = f"layers.{other}."
            held = {k.removeprefix(layer): v for k, v in state.items() if k.startswith(layer)}
            self.layers[str(own)].load_state_dict(held)
        rest = {k: v for k, v in state.items() if not k.startswith("layers.")}
        self.load_state_dict(
            {k: v for k, v in rest.items() if hasattr(self, k.split(".")[0])}, False
        )


def main(job: Job) -> None:
    everything = list(range(LAYERS))
    if job.prepare:
        torch.save(Stage(everything).state_dict(), job.file)
        return
    state = torch.load(job.file, weights_only=True)
    if job.world == 1:
        stages = [Stage(everything)]
        stages[0].read(state, {i: i for i in everything})
    else:
        numbers = range(job.rank, LAYERS, job.world)
        stages = [Stage([i]) for i in numbers]
        for at, (i, stage) in enumerate(zip(numbers, stages, strict=True)):
            stage.read(state, {i: job.rank * len(numbers) + at if job.wrong else i})
        parts = [
            PipelineStage(stage, i, LAYERS, torch.device("cpu"))
            for i, stage in zip(numbers, stages, strict=True)
        ]
        schedule = ScheduleInterleaved1F1B(parts, MICRO, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()], lr=5e-3)
    for step in range(3):
        ids, targets = rows(step, 8)
        if job.world == 1:
            cross_entropy(stages[0](ids), targets).backward()
        elif job.rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=targets)
        optimizer.step()
        optimizer.zero_grad()
    job.keep(pair for stage in stages for pair in stage.named_parameters())


run(main)
