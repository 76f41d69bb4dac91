"""Small jobs on paper: what each rank held, written with the real spool writer, judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.diagnosis.check import check
from rankscope.layout.layoutfile import LayoutFile
from rankscope.layout.placement import Mesh
from rankscope.record.call import Mode
from rankscope.record.finding import Finding, Report
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.spool import recordformat
from rankscope.spool.recordformat import RecordKind
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.tree.ranks_on_paper import PaperRank

LINE = Mesh(axes=("tp",), shape=(4,), ranks=(0, 1, 2, 3))
PAIR = Mesh(axes=("tp",), shape=(2,), ranks=(0, 1))
EVENT = {"micro_batch": None}
Writes = Callable[[PaperRank], None]


def numbers(seed: int, *shape: int) -> np.ndarray:
    """The same random values wherever the seed is the same."""
    return np.random.default_rng(seed).normal(size=shape or (4, 6)).astype(np.float32)


def judged(
    folder: Path,
    world: int,
    write: Writes,
    layout: str = "",
    ends: Mapping[int, EndReason] | None = None,
) -> Report:
    """Write every rank's records, make the tree, and check it. `ends`: how ranks ended that did not
    in order."""
    out = folder / "trace"
    for number in range(world):
        rank = PaperRank(folder, number, world)
        write(rank)
        how = (ends or {}).get(number, EndReason.EXIT)
        if how is not EndReason.LOST:
            rank.end(how)
        rank.ship(out, end=how.value)
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
    ordinal: int = 0,
    wrappers: Sequence[str] = (),
    flags: int = 0,
    dtype: str = "float32",
    mesh: Mesh | None = None,
) -> None:
    """Record a setup, grads or params event."""
    where: dict[str, Any] = {"phase": phase, "step": step, "ordinal": ordinal, **EVENT}
    with rank.call(class_name="Model", wrappers=[*wrappers], **where):
        for name, value in values.items():
            path, _, own = name.rpartition(".")
            with rank.call(path, class_name="Linear", **where) as owner:
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


def collective(
    rank: PaperRank,
    path: str,
    number: int,
    given: np.ndarray | None,
    made: np.ndarray | None,
    *,
    parent: int,
    step: int = 0,
    ordinal: int = 0,
    class_name: str = "Linear",
    **facts: Any,
) -> int:
    """Record a collective inside a forward call; without `made` it never came back."""
    fields = {"op": "all_reduce", "group": "0", "members": [0, 1], "async": False}
    fields |= {"issuer": "forward"} | facts
    if fields["op"] == "all_reduce":
        fields.setdefault("reduce", "sum")
    module = rank.known(
        "module", root=rank.root(), path=path, raw_path=path, wrappers=[], opaque=False,
        **{"class": class_name},
    )  # fmt: skip
    sequence = next(rank._sequence)
    packed = recordformat.ENTER.pack(
        sequence, parent, rank.now(), module, step, 0, ordinal, Phase.COLLECTIVE, Mode.TRAIN, 1,
        rank.root(), rank.known("collective", **fields), number,
    )  # fmt: skip
    rank.writer.write(RecordKind.ENTER, packed)
    if given is not None:
        rank.value(sequence, "input.0", given, phase=Phase.COLLECTIVE, ordinal=ordinal)
    if made is not None:
        rank.value(sequence, "output.0", made, phase=Phase.COLLECTIVE, ordinal=ordinal)
        rank.exit(sequence)
    return sequence


def told(finding: Finding) -> tuple[str, str, str, str, tuple[int, ...]]:
    """Kind, phase, path, slot and ranks of a finding."""
    return (finding.kind.value, finding.phase.word, finding.path, finding.slot, finding.ranks)


def origins(report: Report) -> list[tuple[str, str, str, str, tuple[int, ...]]]:
    """What a report says began it."""
    return [told(finding) for finding in report.origins]
