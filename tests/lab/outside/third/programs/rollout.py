"""PPO with an actor and its critic in DDP; a second model, the engine, writes the answers (vLLM).

The engine takes the actor's weights after each step, all but the critic's. Wrong: it is given those
of the DDP wrapper, whose names begin with `module.`, so that it takes none.
"""

import torch
import torch.distributed as dist
from common import rows, run
from laterprograms import VOCABULARY, WIDTH, Gpt, Job
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PROMPT, NEW, COUNT = 4, 4, 8


class ActorCritic(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(ids)
        return self.head(hidden), self.value(hidden).squeeze(-1)


def chances(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each new token, `[rows, NEW]`."""
    given = logits.log_softmax(-1)[:, PROMPT - 1 :]
    return given.gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


@torch.no_grad()
def write(job: Job, engine: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """Return prompts with their answers, and how likely the engine found each new token."""
    ids = job.mine(rows(step, COUNT, PROMPT)[0])
    for place in range(NEW):
        seed = torch.Generator().manual_seed(1000 + 10 * step + place)
        noise = -torch.empty(COUNT, VOCABULARY).exponential_(generator=seed).log()
        best = (engine(ids)[:, -1] + job.mine(noise)).argmax(-1)
        ids = torch.cat([ids, best[:, None]], 1)
    return ids, chances(engine(ids[:, :-1]), ids)


def main(job: Job) -> None:
    actor = ActorCritic()
    engine = Gpt().requires_grad_(False).eval()
    engine.load_state_dict(actor.state_dict(), strict=False)
    model = DistributedDataParallel(actor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        ids, old = write(job, engine, step)
        reward = (ids[:, PROMPT:] % 2 == 0).float().mean(1, keepdim=True)
        logits, values = model(ids[:, :-1])
        values = values[:, PROMPT - 1 :]
        gain = (reward - values).detach()
        ratio = (chances(logits, ids) - old).exp()
        policy_loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        (policy_loss + 0.5 * (values - reward).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        weights = model.state_dict() if job.wrong else actor.state_dict()
        engine.load_state_dict(weights, strict=False)
        shown = reward.mean()
        dist.all_reduce(shown)
        if job.rank == 0 and job.save:
            print(f"step {step} reward {shown.item() / job.world:.3f}", flush=True)
    job.keep(actor.named_parameters())


run(main)
