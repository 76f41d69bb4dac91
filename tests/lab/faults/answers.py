"""What must be said of each fault: kind, phase, place and ranks, by setup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.lab.faults.expected import Expected
from tests.lab.faults.model import whole
from tests.lab.faults.programs import pipeline
from tests.lab.faults.setup import Setup


def all_ranks(setup: Setup) -> tuple[int, ...]:
    return tuple(range(setup.ranks))


def minority(setup: Setup) -> tuple[int, ...]:
    """The culprit where the others outvote it, else everybody."""
    return (setup.culprit,) if setup.ranks > 2 else all_ranks(setup)


def parameter_names(setup: Setup) -> tuple[tuple[str, str], ...]:
    """Return (path, name) of every parameter of the model."""
    found = (name.rpartition(".") for name, _ in whole(setup).named_parameters())
    return tuple((path, name) for path, _, name in found)


def unreduced(setup: Setup) -> Expected:
    return Expected(
        kinds=("gradient-not-reduced",),
        phases=("grads",),
        places=(("*", "grad:*"),),  # one event: one origin, at the first parameter
        ranks=all_ranks(setup),
        step=0,
    )


def clipped(setup: Setup) -> Expected:
    return Expected(
        kinds=("replica-mismatch",),
        phases=("grads",),
        # the gradient of an embedding is a replicated DTensor as well, though its weight is not
        places=(("*norm", "grad:weight"), ("embed", "grad:weight")),
        all_of=tuple(
            (path, "grad:weight") for path, _ in parameter_names(setup) if path.endswith("norm")
        ),
        ranks=minority(setup),
        step=0,
    )


def router(setup: Setup) -> Expected:
    return Expected(
        kinds=("replica-mismatch",),
        phases=("setup",),
        places=((f"layers.{setup.layer}.feed_forward.router", "param:weight"),),
        ranks=all_ranks(setup),
    )


def row_reduce(setup: Setup) -> Expected:
    attention = f"layers.{setup.layer}.attention"
    return Expected(
        kinds=("replica-mismatch",),
        phases=("forward",),
        places=(
            (f"{attention}.o_proj", "returned"),
            (f"{attention}.o_proj", "output"),
            (attention, "output"),
        ),
        ranks=all_ranks(setup),
        step=0,
    )


def groups(setup: Setup) -> Expected:
    return Expected(
        kinds=("group-mismatch",),
        phases=("collective",),
        places=(("layers.0.attention.o_proj", "collective.*"),),
        ranks=all_ranks(setup),
        evidence=("[0, 2]", "[1, 3]"),
    )


def lie(setup: Setup) -> Expected:
    path = f"layers.{setup.layer}.feed_forward"
    return Expected(
        kinds=("placement-mismatch",),
        phases=("forward",),
        places=((path, "*"), (f"{path}.inner", "input*"), (f"{path}.inner.up_proj", "input*")),
        ranks=minority(setup),
        step=0,
    )


def infinity(setup: Setup) -> Expected:
    """The others catch it: the tensor-parallel peer in the sum of the same layer, the other data
    row when gradients meet."""
    path = f"layers.{setup.layer}.feed_forward"
    peer, row = setup.culprit ^ 1, 0 if setup.culprit >= 2 else 2
    return Expected(
        kinds=("nonfinite-origin",),
        phases=("forward",),
        places=((f"{path}.act", "output"),),
        ranks=(setup.culprit,),
        step=3,
        evidence=(f"{path}.down_proj:collective.0 (rank {peer})", f"(ranks {row}-{row + 1})"),
    )


def swap(setup: Setup) -> Expected:
    path = f"layers.{setup.layer}.feed_forward.statistics"
    return Expected(
        kinds=("collective-mismatch",),
        phases=("collective",),
        places=((path, "collective.*"),),
        ranks=minority(setup),
        step=0,
        evidence=("sum_of_values", "sum_of_squares"),
    )


def unmoved(setup: Setup) -> Expected:
    return Expected(
        kinds=("parameter-not-updated",),
        phases=("params",),
        places=(("*", "param:*"),),
        all_of=tuple((path, f"param:{name}") for path, name in parameter_names(setup)),
        ranks=all_ranks(setup),
        step=0,
    )


def double_counted(setup: Setup) -> Expected:
    return Expected(
        kinds=("replica-mismatch",),
        phases=("grads",),
        places=((f"layers.{setup.layer}.feed_forward_norm", "grad:weight"),),
        ranks=minority(setup),
        step=0,
    )


def norm_apart(setup: Setup) -> Expected:
    """Of two ranks that share a layer one counts twice: nobody can say which is right."""
    return replace(double_counted(setup), ranks=all_ranks(setup))


def shard_order(setup: Setup) -> Expected:
    return Expected(
        kinds=("replica-mismatch",),
        phases=("setup",),
        places=((f"layers.{setup.layer}.attention.q_proj", "param:weight"),),
        ranks=all_ranks(setup),
    )


def left_dtype(setup: Setup) -> Expected:
    return Expected(
        kinds=("dtype-mismatch",),
        phases=("setup",),
        places=((f"layers.{setup.layer}.feed_forward_norm", "param:weight"),),
        ranks=(setup.culprit,),
    )


def recomputed(setup: Setup) -> Expected:
    return Expected(
        kinds=("recompute-mismatch",),
        phases=("recompute",),
        places=((f"layers.{setup.layer}.dropout", "output"),),
        ranks=all_ranks(setup),
        step=0,
    )


def shared_rows(setup: Setup) -> Expected:
    return Expected(
        kinds=("duplicate-data",),
        phases=("forward",),
        places=(("", "input*"),),
        ranks=all_ranks(setup),
        step=0,
        severity="warning",  # nothing breaks, and to overfit one batch is legal
    )


def stale(setup: Setup) -> Expected:
    return Expected(
        kinds=("collective-mismatch",),  # what went in is not what was received
        phases=("forward",),
        places=(
            ("", "input*"),
            (f"layers.{pipeline.layers_of(setup, setup.culprit)[0]}*", "input*"),
        ),
        ranks=(setup.culprit,),
        step=0,
    )


def partial_norm(setup: Setup) -> Expected:
    return Expected(
        kinds=("gradient-not-reduced", "replica-mismatch"),
        phases=("grads",),
        places=((f"layers.{setup.layer}.feed_forward_norm", "grad:weight"),),
        ranks=all_ranks(setup),
        step=0,
    )


def partial_norms(setup: Setup) -> Expected:
    """No norm's gradient is summed."""
    norms = [path for path, _ in parameter_names(setup) if path.endswith("norm")]
    return replace(
        partial_norm(setup),
        places=(("*norm", "grad:weight"),),
        all_of=tuple((path, "grad:weight") for path in norms),
    )


def swapped_experts(setup: Setup) -> Expected:
    experts = f"layers.{setup.layer}.feed_forward.experts"
    both = tuple(f"{experts}.{n}.{part}_proj" for n in range(2) for part in ("up", "down"))
    places = tuple((path, "param:weight") for path in both)
    return Expected(
        kinds=("replica-mismatch", "permutation"),
        phases=("setup",),
        places=places,
        all_of=places,
        ranks=minority(setup),
    )


def own_gradient(path: str) -> Callable[[Setup], Expected]:
    """One rank keeps its own gradient of one weight."""

    def expectation(setup: Setup) -> Expected:
        return Expected(
            kinds=("replica-mismatch", "gradient-not-reduced"),
            phases=("grads",),
            places=((path.format(layer=setup.layer), "grad:weight"),),
            ranks=minority(setup),
            step=0,
        )

    return expectation
