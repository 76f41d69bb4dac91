"""The traces that exports are read back against: small, without a tree.json, odd, and of a real
program."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.export.formats import Selection, export
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.tree.jobs import grid_job
from tests.tree.ranks_on_paper import PaperRank

NAMES = ("grid", "treeless", "odd", "real")
ODD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3.0], np.float32)


def odd_job(folder, out):
    """Two ranks, the second restarted: what raised, what never ended, what has no numbers."""
    for number, incarnation in ((0, 0), (1, 0), (0, 1), (1, 1)):
        rank = PaperRank(folder, number, 2, incarnation=incarnation, clock=incarnation * 10**9)
        top = rank.enter()
        rank.value(top, "output", ODD)
        rank.value(top, "input.0", None, flags=int(ValueFlag.PENDING), note="in flight")
        rank.value(
            top, "input.flag", None, dtype="python", note="'a\nb \0é'", flags=int(ValueFlag.PYTHON)
        )
        rank.value(top, "grad_input.0", np.full(4, np.nan, np.float32), phase=Phase.BACKWARD)
        child = rank.enter('odd."name"\n\0é', parent=top)
        rank.value(child, "output", np.ones((number + 1, 2), np.float32))
        if (number, incarnation) == (1, 0):
            rank.error(child, "digest failed: RuntimeError")
            rank.exit(child, CallStatus.RAISED, "ValueError: no")
        elif incarnation:
            rank.exit(child)
            rank.exit(top)
            with rank.call(mode="eval", step=0) as looking:
                rank.value(looking, "output", ODD[3:], samples=True)
            rank.end()
        rank.ship(out)


def real_job(out):
    """A real module, forward, backward and an optimizer's step."""
    import torch

    import rankscope

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=out):
        for _ in range(2):
            model(torch.randn(3, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="session")
def traces(tmp_path_factory):
    """{name: trace}: grid (two hosts), treeless (the same without a tree.json), odd, real."""
    base = tmp_path_factory.mktemp("traces")
    for name, wanted in (("grid", "always"), ("treeless", "never")):
        grid_job(base / f"{name}-spools", base / name, steps=2)
        build(base / name, tree_mode=wanted)
    assert not (base / "treeless/tree.json").exists()
    odd_job(base / "odd-spools", base / "odd")
    build(base / "odd")
    real_job(base / "real")
    return {name: open_trace(base / name) for name in NAMES}


@pytest.fixture(params=NAMES)
def trace(request, traces):
    return traces[request.param]


def selected(**words):
    """A selection in the words of the command line."""
    return Selection.parse(
        **dict.fromkeys(("step", "mode", "phase", "rank"), "") | {"path": "*"} | words
    )


def exported(trace, name, out, **words):
    """Write an export; return what was said of it."""
    return export(trace, name, out, selected(**words), lambda what, part: None)


def call_rows(trace):
    """{(node, rank): (start, duration, status)} straight from the columns of the steps."""
    found = {}
    for step in (*trace.setup, *trace.steps):
        columns = step.columns()
        ids = columns["nodes.id"].tolist()
        for node, rank, start, duration, status in zip(
            *(
                columns[f"calls.{name}"].tolist()
                for name in ("node", "rank", "start_ns", "duration_ns", "status")
            )
        ):
            assert (f"{ids[node]:016x}", rank) not in found
            found[f"{ids[node]:016x}", rank] = start, duration, CallStatus(status).word
    return found


def held_values(trace):
    """{(node, slot, rank): numbers or None}: each rank's own, as `open_trace` reads the columns."""
    held = {}
    for node in trace.walk():
        for slot in node.slots:
            folded = slot.per_rank()
            columns = slot.step
            for row in range(slot.rows.start, slot.rows.stop):
                rank = int(columns["values.rank"][row])
                own = columns.digest(row)
                assert getattr(folded[rank], "hash", None) == getattr(own, "hash", None)
                held[node.id, slot.slot, rank] = own
    return held
