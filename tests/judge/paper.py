"""Small jobs on paper: what each rank held, written with the real spool writer, judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.judge.check import check
from rankscope.record.call import Phase
from rankscope.record.finding import Finding, Report
from rankscope.record.layoutfile import LayoutFile
from rankscope.record.placement import Mesh
from rankscope.tree.assemble import build
from rankscope.tree.reader import open_trace
from tests.tree.ranks_on_paper import PaperRank

LINE = Mesh(axes=("tp",), shape=(4,), ranks=(0, 1, 2, 3))
PAIR = Mesh(axes=("tp",), shape=(2,), ranks=(0, 1))
EVENT = {"micro_batch": None}
Writes = Callable[[PaperRank], None]


def numbers(seed: int, *shape: int) -> np.ndarray:
    """The same random values wherever the seed is the same."""
    return np.random.default_rng(seed).normal(size=shape or (4, 6)).astype(np.float32)


def judged(folder: Path, world: int, write: Writes, layout: str = "") -> Report:
    """Write every rank's records, make the tree, and check it."""
    out = folder / "trace"
    for number in range(world):
        rank = PaperRank(folder, number, world)
        write(rank)
        rank.end()
        rank.ship(out)
    build(out)
    return check(open_trace(out), LayoutFile.parse(layout) if layout else None)


def setup(
    rank: PaperRank, parameters: Mapping[str, np.ndarray], wrappers: Sequence[str] = (), **how: Any
) -> None:
    """Record parameters at setup: {path.name: value}."""
    event(rank, Phase.SETUP, "param", parameters, wrappers=wrappers, **how)


def event(
    rank: PaperRank,
    phase: Phase,
    kind: str,
    values: Mapping[str, np.ndarray],
    *,
    step: int = 0,
    wrappers: Sequence[str] = (),
    flags: int = 0,
    dtype: str = "float32",
    mesh: Mesh | None = None,
) -> None:
    """Record a setup, grads or params event."""
    with rank.call(class_name="Model", phase=phase, step=step, wrappers=[*wrappers], **EVENT):
        for name, value in values.items():
            path, _, own = name.rpartition(".")
            with rank.call(path, class_name="Linear", phase=phase, step=step, **EVENT) as owner:
                placed = placed_on(mesh, value) if mesh else {}
                rank.value(
                    owner, f"{kind}:{own}", value, phase=phase, flags=flags, dtype=dtype, **placed
                )


def placed_on(mesh: Mesh, value: np.ndarray) -> dict[str, Any]:
    """A replicated DTensor."""
    return {"mesh": mesh, "placements": ["Replicate()"] * len(mesh.axes), "whole": value.shape}


def module(
    rank: PaperRank,
    path: str,
    given: np.ndarray,
    made: np.ndarray,
    *,
    mesh: Mesh | None = None,
    step: int = 0,
    class_name: str = "Linear",
    **how: Any,
) -> None:
    """Record one forward call with one input and one output, a replicated DTensor or plain."""
    with rank.call(path, class_name=class_name, step=step, **how) as call:
        phase = how.get("phase", Phase.FORWARD)
        rank.value(call, "input.0", given, phase=phase, **(placed_on(mesh, given) if mesh else {}))
        rank.value(call, "output", made, phase=phase, **(placed_on(mesh, made) if mesh else {}))


def told(finding: Finding) -> tuple[str, str, str, str, tuple[int, ...]]:
    """Kind, phase, path, slot and ranks of a finding."""
    return (finding.kind.value, finding.phase.word, finding.path, finding.slot, finding.ranks)


def origins(report: Report) -> list[tuple[str, str, str, str, tuple[int, ...]]]:
    """What a report says began it."""
    return [told(finding) for finding in report.origins]
