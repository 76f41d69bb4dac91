"""Traces of jobs on paper to look at in pages: what real jobs do not do in a second.

The records go through the real spool writer and the real assembly. Each function leaves the trace
in `folder / "trace"` and returns its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from rankscope.layout.placement import Mesh
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.record.value import ValueFlag
from rankscope.spool.recordformat import StepEvent
from rankscope.tree.build import build
from tests.diagnosis.paper import collective, event, module, numbers, setup
from tests.tree.ranks_on_paper import PaperRank

__all__ = ["HOSTILE", "PAPER", "hostile"]

GRID = Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))
WORLD = len(GRID.ranks)
PARTS = {"norm": "RMSNorm", "attention": "Attention", "feed_forward": "FeedForward"}


def written(
    folder: Path,
    write: Callable[[PaperRank], None],
    ends: Mapping[int, EndReason] | None = None,
    *,
    world: int = WORLD,
    cut: Mapping[int, int] | None = None,
) -> Path:
    """Write what each rank records and make the tree of it. `ends`: how ranks ended that did not in
    order. `cut`: how many bytes of a rank's records never arrived."""
    out = folder / "trace"
    for number in range(world):
        rank = PaperRank(folder / "spool", number, world, host=f"node{number // 2}")
        write(rank)
        how = (ends or {}).get(number, EndReason.EXIT)
        if how is not EndReason.LOST:
            rank.end(how)
        rank.ship(out, end=how.value, cut=(cut or {}).get(number, 0))
    build(out)
    return out


def row(rank: PaperRank) -> int:
    """Which data-parallel row a rank is in: ranks of one row work on the same samples."""
    return rank.rank // 2


def layer(rank: PaperRank, path: str, step: int, *, wrong: str = "") -> np.ndarray:
    """Record the calls of one layer; `wrong`: a part that hands out another shape on this rank."""
    given = numbers(len(path) + 100 * step + row(rank), 4, 6)
    for number, (name, class_name) in enumerate(PARTS.items()):
        made = numbers(len(path) + number + 100 * step + row(rank), 4, 6)
        if name == wrong:
            made = made[:3]
        whole = f"{path}.{name}"
        module(rank, whole, given, made, step=step, class_name=class_name)
        given = made
    return given


def trained(rank: PaperRank, step: int, **wrong: str) -> None:
    """Record one step of a model of two layers; `wrong` is for its second layer."""
    rank.step(StepEvent.BEGIN, step)
    with rank.call(class_name="Model", step=step) as top:
        rank.value(top, "input.0", numbers(7 + step + 10 * row(rank)), samples=True)
        for number in range(2):
            path = f"layers.{number}"
            with rank.call(path, class_name="Block", step=step) as block:
                made = layer(rank, path, step, **(wrong if number else {}))
                rank.value(block, "output", made)
        rank.value(top, "output", made)
    event(rank, Phase.GRADS, "grad", {"head.weight": numbers(50 + step)}, step=step)
    event(rank, Phase.PARAMS, "param", {"head.weight": numbers(60 + step)}, step=step)
    rank.step(StepEvent.END, step)


def begun(rank: PaperRank) -> None:
    """Record the parameters."""
    setup(rank, {"head.weight": numbers(3), "layers.0.norm.weight": np.ones(6, np.float32)})


def structure(folder: Path) -> Path:
    """One rank leaves out a module in one step."""

    names = ("embed", "adapter", "head")

    def write(rank: PaperRank) -> None:
        setup(rank, {f"{name}.weight": numbers(number) for number, name in enumerate(names)})
        for step in range(3):
            with rank.call(class_name="Model", step=step) as top:
                rank.value(top, "input.0", numbers(step))
                for name in names:
                    if (name, rank.rank, step) != ("adapter", 3, 1):
                        module(rank, name, numbers(step), numbers(step + 9), step=step)

    return written(folder, write)


def shape(folder: Path) -> Path:
    """One rank hands out fewer rows than the others."""

    def write(rank: PaperRank) -> None:
        begun(rank)
        for step in range(2):
            with rank.call(class_name="Model", step=step):
                made = numbers(step + 9, 4, 6)[: 3 if rank.rank == 2 and step else 4]
                module(rank, "embed", numbers(step), made, step=step, mesh=GRID)
                module(rank, "head", made, numbers(step + 5), step=step, mesh=GRID)

    return written(folder, write)


def crash(folder: Path) -> Path:
    """One rank raises inside a module of the third step; the others wait for it and are ended."""

    def write(rank: PaperRank) -> None:
        begun(rank)
        for step in range(2):
            trained(rank, step)
        rank.step(StepEvent.BEGIN, 2)
        top = rank.enter(class_name="Model", step=2)
        rank.value(top, "input.0", numbers(9))
        head = rank.enter("layers.1.attention", class_name="Attention", parent=top, step=2)
        if rank.rank == 1:
            error = "RuntimeError: CUDA error: an illegal memory access was encountered"
            rank.exit(head, CallStatus.RAISED, error)
            rank.exit(top, CallStatus.RAISED, error)
            rank.define("raised", error=error, causes=[], where="model.py:31 forward")
        else:
            members = [*GRID.ranks]
            given = numbers(0, 6)
            collective(
                rank, "layers.1.attention", 0, given, None, parent=head, members=members, step=2
            )

    return written(folder, write, dict.fromkeys((0, 2, 3), EndReason.LOST) | {1: EndReason.RAISED})


def hang(folder: Path) -> Path:
    """One rank passes by a collective in the second step; nobody came to an end."""

    def write(rank: PaperRank) -> None:
        begun(rank)
        trained(rank, 0)
        rank.step(StepEvent.BEGIN, 1)
        top = rank.enter(class_name="Model", step=1)
        layer(rank, "layers.0", 1)
        if rank.rank != 2:
            gate = rank.enter("layers.1.gate", class_name="Gate", parent=top, step=1)
            members = [*GRID.ranks]
            given = numbers(0, 6)
            collective(rank, "layers.1.gate", 0, given, None, parent=gate, members=members, step=1)
        else:
            rank.enter("layers.1.feed_forward", class_name="FeedForward", parent=top, step=1)

    return written(folder, write, dict.fromkeys(range(WORLD), EndReason.LOST))


def missing(folder: Path) -> Path:
    """The records of one rank break off in the middle; another noted that it had to drop some."""

    def write(rank: PaperRank) -> None:
        begun(rank)
        for step in range(3):
            trained(rank, step)
        if rank.rank == 3:
            rank.gap(17, 1, 2)
            rank.error(None, "digest failed: RuntimeError: out of memory")

    return written(folder, write, {1: EndReason.LOST}, cut={1: 8000})


LONG = "very_long_" * 1000
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "--> <img src=x onerror=alert(3)>",
    "&lt;b&gt; &amp; &#0;",
    "'\"` ${alert(4)} {{7*7}}",
    "a\0b\x01\x1b[31m\x7f",
    "two\nlines\r\n\tthree\u2028four\u2029",
    "\u202eright to left\u202c \u200f\u2066x\u2069",
    "\\ud800 \\u003cscript\\u003e",
    "\ufeff\u200b\u0301\U0001f9e8\U000e0001",
    "__proto__",
    "constructor",
    "toString",
    "path=x&step=1&rank=2#%23%00%zz",
    "javascript:alert(5)",
    "]]> */ // -- ;",
    " leading and trailing ",
    LONG,
)
"""Names that somebody could give a module, and that a page could stumble over."""
ODD = {
    "nan": np.full(6, np.nan, np.float32),
    "inf": np.array([np.inf, -np.inf, 1, 0, -0.0, 1e-40], np.float32),
    "largest": np.full(6, np.finfo(np.float32).max, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.float32(3.0).reshape(()),
}


def hostile(folder: Path) -> Path:
    """All that has a name has a bad one: modules, classes, slots, dtypes, collectives, groups,
    wrappers, hosts, notes, errors; and values are what values can be."""

    def write(rank: PaperRank) -> None:
        root = rank.root(f"Model{HOSTILE[0]}")
        everything = {"class_name": f"Model{HOSTILE[1]}", "root": root}
        for step in range(2):
            rank.step(StepEvent.BEGIN, step, note=HOSTILE[0])
            with rank.call(step=step, wrappers=[*HOSTILE[:6]], **everything) as top:
                for number, name in enumerate(HOSTILE):
                    _call(rank, name, number, step, root)
                for name, value in ODD.items():
                    rank.value(top, f"output.{name}.{HOSTILE[number % 7]}", value)
                given = "'a\nb \0é</script>'"
                python = int(ValueFlag.PYTHON)
                rank.value(top, "input.flag", None, dtype="python", note=given, flags=python)
                pending = int(ValueFlag.PENDING)
                rank.value(top, "input.0", None, flags=pending, note=HOSTILE[1])
            rank.step(StepEvent.NOTE, step, note=HOSTILE[3])
            rank.step(StepEvent.END, step)
        rank.error(top, "".join(HOSTILE[:-1]))
        if rank.rank == 1:
            failed = rank.enter(HOSTILE[0], class_name=HOSTILE[1], root=root, step=1)
            rank.exit(failed, CallStatus.RAISED, f"ValueError: {HOSTILE[1]}{HOSTILE[8]}")
            error = f"ValueError: {HOSTILE[1]}"
            rank.define("raised", error=error, causes=[HOSTILE[0]], where=HOSTILE[3])

    out = folder / "trace"
    for number in range(3):
        rank = PaperRank(
            folder / "spool",
            number,
            3,
            host=f"h{HOSTILE[0]}",
            identity={
                "argv": [*HOSTILE[:-1]],
                "versions": {HOSTILE[0]: HOSTILE[1]},
                "settings": {"steps": HOSTILE[2]},
                "environment": {HOSTILE[5]: HOSTILE[6]},
            },
        )
        write(rank)
        rank.end(EndReason.RAISED if number == 1 else EndReason.EXIT)
        rank.ship(out)
    build(out)
    return out


def _call(rank: PaperRank, name: str, number: int, step: int, root: int) -> None:
    """Record one call with a bad name, one below it, and a collective; one rank's values differ."""
    with rank.call(name, class_name=name, step=step, root=root) as outer:
        rank.value(outer, f"input.{name[:200]}", numbers(number, 4, 6))
        rank.value(outer, "output", numbers(number), dtype=name[:60], note=name[:300])
    with rank.call(f"{name}.{number}", class_name="Linear", step=step, root=root) as inner:
        if number == 2:
            wrong = 5 if rank.rank == 2 else 4
            given = {"mesh": THREE, "placements": ["Replicate()"], "whole": (4, 6)}
            rank.value(inner, "output", numbers(wrong), **given)
        else:
            rank.value(inner, "output", numbers(number), flags=0)
    if number < 12:
        facts = {"op": name, "group": name, "reduce": name, "members": [0, 1, 2], "at": name}
        summed, given = numbers(number, 6), numbers(number, 6)
        collective(rank, name, number, given, summed, parent=outer, step=step, **facts)


def unbounded(folder: Path) -> Path:
    """A parameter that never moves, and gradients whose squares no float64 holds."""
    frozen, large = numbers(5), np.full((4, 6), 1e200)
    large[0] = -2e200

    def write(rank: PaperRank) -> None:
        setup(rank, {"head.weight": numbers(3), "frozen.weight": frozen})
        for step in range(2):
            rank.step(StepEvent.BEGIN, step)
            with rank.call(class_name="Model", step=step) as top:
                rank.value(top, "input.0", numbers(7 + step), samples=True)
                module(rank, "head", numbers(step), numbers(step + 9), step=step)
                rank.value(top, "output", numbers(step + 9))
            event(rank, Phase.GRADS, "grad", {"head.weight": large}, step=step)
            moved = {"head.weight": numbers(60 + step), "frozen.weight": frozen}
            event(rank, Phase.PARAMS, "param", moved, step=step)
            rank.step(StepEvent.END, step)

    return written(folder, write, world=1)


def losses(folder: Path) -> Path:
    """A model that returns logits and a loss, which falls and is NaN on one rank in the end; the
    least and the greatest of two micro-batches; an evaluation in between."""

    def write(rank: PaperRank) -> None:
        setup(rank, {"head.weight": numbers(3)})
        for step in range(4):
            rank.step(StepEvent.BEGIN, step)
            for micro_batch in range(2):
                loss = 4.0 - step + rank.rank + 0.5 * micro_batch
                if (step, rank.rank, micro_batch) == (3, 1, 1):
                    loss = float("nan")
                how = {"class_name": "Model", "step": step, "micro_batch": micro_batch}
                with rank.call(**how) as top:
                    rank.value(top, "input.0", numbers(rank.rank), samples=True)
                    rank.value(top, "output.logits", numbers(9 + rank.rank))
                    rank.value(top, "output.loss", np.float32(loss).reshape(()))
                    rank.value(top, "output.length", np.float32(7).reshape(()))
            rank.step(StepEvent.END, step)
        with rank.call(class_name="Model", mode="eval") as top:
            rank.value(top, "output.loss", np.float32(99).reshape(()))

    return written(folder, write, world=2)


THREE = Mesh(axes=(HOSTILE[0],), shape=(3,), ranks=(0, 1, 2))
PAPER: dict[str, Callable[[Path], Path]] = {
    "structure-mismatch": structure,
    "shape-mismatch": shape,
    "crash": crash,
    "hang": hang,
    "missing": missing,
    "hostile": hostile,
    "unbounded": unbounded,
    "losses": losses,
}
"""Name -> what makes its trace. Those named as a kind of finding have one of that kind."""
