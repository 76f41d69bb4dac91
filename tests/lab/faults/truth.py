"""Proofs that a fault is real and that a program without it is right; nothing here knows rankscope.

Values are compared over ranks with plain collectives after training, and gradients with those of
one process that trains the whole model on the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.faults.model import batch, loss_of, whole
from tests.lab.faults.setup import Setup, Trained

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Relative L2 error a gradient may have beside that of one process, by dtype."""


def everywhere(value: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return this value as every rank of the group holds it, whatever its shape."""
    held: list[Tensor] = [torch.empty(0)] * dist.get_world_size(group)
    dist.all_gather_object(held, local(value), group=group)
    return held


def local(value: Tensor) -> Tensor:
    """Return what this rank holds of a value, detached."""
    value = value.detach()
    return getattr(value, "_local_tensor", value)


def differing(
    values: Mapping[str, Tensor], teams: Sequence[Sequence[int]] | None = None
) -> list[str]:
    """Return the names whose values are not bitwise the same on all ranks of a team.

    `teams`: lists of ranks that should agree; by default all ranks.
    """
    wanted = teams or [range(dist.get_world_size())]
    found = []
    for name, value in values.items():
        held = everywhere(value)
        if any(not torch.equal(held[team[0]], held[r]) for team in wanted for r in team):
            found.append(name)
    return found


def moved(trained: Trained) -> list[str]:
    """Return the parameters of the model that are not what they were before training."""
    now = dict(trained.model.named_parameters())
    return [n for n, old in trained.before.items() if not torch.equal(local(now[n]), local(old))]


def reference_gradients(setup: Setup, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Return the gradients of the first step of one process with the whole model and batch."""
    alone = whole(setup) if model is None else model
    tokens, targets = batch(setup, 0)
    loss_of(alone(tokens), targets).backward()
    return {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}


def whole_gradients(
    trained: Trained, members: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Return the gradients of the first step, put together from the ranks that share them.

    `members`: the group over which parameters were cut by hand.
    """
    found = {}
    for name, value in trained.gradients.items():
        if hasattr(value, "full_tensor"):
            found[name] = value.full_tensor()
        elif name in trained.cuts:
            found[name] = torch.cat(everywhere(value, members), trained.cuts[name])
        else:
            found[name] = value
    return found


def wrong_gradients(
    setup: Setup, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Return, over all ranks, the names of gradients that are not those of one process."""
    truth = reference_gradients(setup) if theirs is None else theirs
    missing = [f"{name} (missing)" for name in truth.keys() - ours.keys()]
    return sorted({*wrong_values(setup, ours, truth), *united(missing)})


def wrong_values(
    setup: Setup, ours: Mapping[str, Tensor], truth: Mapping[str, Tensor]
) -> list[str]:
    """Return, over all ranks, the names of what a rank has that is not as in one process."""
    limit = TOLERANCE[setup.dtype]
    return united(n for n in ours if n not in truth or error(ours[n], truth[n]) > limit)


def error(ours: Tensor, truth: Tensor) -> float:
    """Return the relative L2 error."""
    if ours.shape != truth.shape:
        return float("inf")
    a, b = ours.double(), truth.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def united(names: Iterable[str]) -> list[str]:
    """Return the names any rank has, the same on all ranks."""
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, sorted(names))
    return sorted({name for held in every for name in held})


def said(what: str, names: Sequence[str]) -> str:
    """Return a proof's line, empty where there is nothing to say."""
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}: {', '.join(names[:3])}{more}"


def like_one_process(setup: Setup, trained: Trained) -> str:
    """Prove gradients right or wrong: those of all ranks put together, against one process."""
    return said("gradients unlike one process", wrong_gradients(setup, whole_gradients(trained)))
