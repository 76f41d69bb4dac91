"""Proofs against one process, or against the algorithm of all ranks written out in one process."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from tests.lab.faults import truth
from tests.lab.faults.rows import Oracle, Program
from tests.lab.faults.setup import Setup, Trained

LIMIT = 2e-4
"""Relative L2 error that a value may have."""
State = dict[str, Tensor]


def state(model: nn.Module) -> State:
    """Return parameters and buffers by name, copied."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def as_alone(alone: Program, *, limit: float = LIMIT, apart: Sequence[str] = ()) -> Oracle:
    """Return an oracle: the first gradients, and all values after training, are those of one
    process. `apart`: globs of values that each rank has for itself."""

    def oracle(setup: Setup, trained: Trained) -> str:
        theirs = alone(replace(setup, ranks=1, is_faulty=False))
        ours = joined(trained, state(trained.model), apart)
        gradients = joined(trained, trained.gradients, apart)
        return (
            unlike("gradients", gradients, theirs.gradients, limit)
            or unlike("values after training", ours, state(theirs.model), limit)
            or absent(ours, state(theirs.model), apart)
        )

    return oracle


def as_written_out(
    simulated: Callable[[Setup], Sequence[State]], *, limit: float = LIMIT
) -> Oracle:
    """Return an oracle: after training every rank holds what the algorithm, written out for all
    ranks in one process, gives that rank."""

    def oracle(setup: Setup, trained: Trained) -> str:
        theirs = simulated(replace(setup, is_faulty=False))[dist.get_rank()]
        ours = state(trained.model)
        missing = truth.united(theirs.keys() ^ ours.keys())
        return truth.said("on one side alone", missing) or unlike(
            "values after training", ours, theirs, limit
        )

    return oracle


def both(first: Oracle, second: Oracle) -> Oracle:
    """Return an oracle that asks two."""

    def oracle(setup: Setup, trained: Trained) -> str:
        said = (first(setup, trained), second(setup, trained))  # both are collective
        return "; ".join(filter(None, said))

    return oracle


def noted_alike(setup: Setup, trained: Trained) -> str:
    """What a program wrote down is the same on all ranks."""
    values = {
        f"{name} {number}": value
        for name, kept in sorted(trained.seen.items())
        for number, value in enumerate(kept)
    }
    return truth.said("differs over ranks", truth.differing(values))


def joined(trained: Trained, values: Mapping[str, Tensor], apart: Sequence[str]) -> State:
    """Return values with those that were cut by hand put together."""
    shared = {n: v for n, v in values.items() if not any(fnmatch.fnmatch(n, a) for a in apart)}
    pieces = replace(trained, gradients=shared)
    return truth.whole_gradients(pieces, trained.group)


def unlike(what: str, ours: State, theirs: State, limit: float) -> str:
    """Say, over all ranks, which values differ."""
    whole = max((float(value.double().norm()) for value in theirs.values()), default=0.0)
    wrong = [n for n in ours if n not in theirs or not distance(ours[n], theirs[n], whole) <= limit]
    return truth.said(f"{what} unlike one process", truth.united(wrong))


def distance(ours: Tensor, theirs: Tensor, whole: float) -> float:
    """Return the relative L2 error; what is next to nothing beside the rest is held to that."""
    if ours.shape != theirs.shape:
        return float("inf")
    a, b = ours.double(), theirs.double()
    return float((a - b).norm() / b.norm().clamp_min(max(1e-3 * whole, 1e-12)))


def absent(ours: State, theirs: State, apart: Sequence[str]) -> str:
    """Say what no rank holds."""
    names = truth.united(ours)
    missing = [n for n in theirs if not any(fnmatch.fnmatch(n, a) for a in apart)]
    return truth.said("on no rank", sorted(set(missing) - set(names)))
