"""True layouts of right programs, and how much of them `rankscope layout` finds.

python -m tests.lab.faults.layouts     # the figures of docs/commands/layout.md
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    from tests.lab.faults.__main__ import for_children

    for_children()

from rankscope.cli.layout import proposal_lines
from rankscope.diagnosis.layoutproposal import propose_layout
from rankscope.layout.layoutfile import LayoutFile
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool
from tests.lab.faults import ranks
from tests.lab.faults.layouttext import layout_text
from tests.lab.faults.runs import FAULTS
from tests.lab.faults.setup import Setup

_BLOCK = "layers.[0-9]"
_STREAM = ("", "embed", "norm", "head", _BLOCK, f"{_BLOCK}.*norm", f"{_BLOCK}.dropout")
"""Modules that hand on what is as wide as the model, one value for each token."""
_WHOLE = ("embed", "positions", "norm", "head", f"{_BLOCK}.*norm")
_COLUMN = (f"{_BLOCK}.attention.[qkv]_proj", f"{_BLOCK}.feed_forward.up_proj")
_ROW = (f"{_BLOCK}.attention.o_proj", f"{_BLOCK}.feed_forward.down_proj")
_AROUND = (f"{_BLOCK}.attention", f"{_BLOCK}.feed_forward")
_INSIDE = f"{_BLOCK}.feed_forward.act"
REPLICATE = "Replicate()"

Said = list[tuple[str, str, str]]
"""(path, slot, placement)"""


def along(dim: int) -> str:
    return f"Shard({dim})"


def _of(paths: tuple[str, ...], slots: tuple[str, ...], placement: str) -> Said:
    return [(path, slot, placement) for path in paths for slot in slots]


def _cut_weights() -> Said:
    return _of(_COLUMN, ("param:weight",), along(0)) + _of(_ROW, ("param:weight",), along(1))


def _tensor() -> Said:
    both = ("input", "output")
    return (
        _of(_WHOLE, ("param:weight",), REPLICATE)
        + _cut_weights()
        + _of((*_STREAM, *_AROUND, "positions"), both, REPLICATE)
        + _of(_COLUMN, ("input",), REPLICATE)
        + _of(_COLUMN, ("output",), along(2))
        + _of(_ROW, ("input",), along(2))
        + _of(_ROW, ("output",), REPLICATE)
        + _of((_INSIDE,), both, along(2))
    )


def _sequence() -> Said:
    both = ("input", "output")
    return (
        _of(_WHOLE, ("param:weight",), REPLICATE)
        + _cut_weights()
        + _of((*_STREAM, *_AROUND), both, along(1))
        + _of(("positions",), both, along(0))
        + _of(_COLUMN, ("input",), along(1))
        + _of(_COLUMN, ("output",), along(2))
        + _of(_ROW, ("input",), along(2))
        + _of(_ROW, ("output",), along(1))
        + _of((_INSIDE,), both, along(2))
    )


def _context() -> Said:
    both = ("input", "output")
    whole = (*_WHOLE, *_COLUMN, *_ROW)
    return (
        _of(whole, ("param:weight",), REPLICATE)
        + _of((*_STREAM, *_AROUND, *_COLUMN, *_ROW, _INSIDE), both, along(1))
        + _of(("positions",), both, along(0))
    )


def _experts() -> Said:
    both = ("input", "output")
    attention = (f"{_BLOCK}.attention.?_proj",)
    router = (f"{_BLOCK}.feed_forward.router",)
    return (
        _of((*_WHOLE, *attention, *router), ("param:weight",), REPLICATE)
        + _of((*_STREAM, *_AROUND, *attention, *router), both, along(0))
        + _of(("positions",), ("input",), REPLICATE)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueLayout:
    """What is true of one program of the benchmark."""

    program: str
    axes: Mapping[str, int]
    said: Mapping[str, Said]
    """By axis."""

    @property
    def file(self) -> LayoutFile:
        """The layout file that says all of it."""
        axes = ",".join(f"{axis}={size}" for axis, size in self.axes.items())
        entries = [
            (path, slot, {axis: placement})
            for axis, said in self.said.items()
            for path, slot, placement in said
        ]
        return LayoutFile.parse(layout_text(axes, entries), self.program)


def _data() -> Said:
    """Of the axis of the batch: parameters are whole, rows are cut."""
    both = ("input", "output")
    parameters = _of((*_WHOLE, *_COLUMN, *_ROW), ("param:weight",), REPLICATE)
    paths = (*_STREAM, *_AROUND, *_COLUMN, *_ROW, _INSIDE)
    return parameters + _of(paths, both, along(0)) + _of(("positions",), ("input",), REPLICATE)


TRUE = (
    TrueLayout(program="tp-by-hand", axes={"tp": 2}, said={"tp": _tensor()}),
    TrueLayout(program="tp-by-hand", axes={"tp": 4}, said={"tp": _tensor()}),
    TrueLayout(program="sequence-parallel", axes={"tp": 2}, said={"tp": _sequence()}),
    TrueLayout(program="sequence-parallel", axes={"tp": 4}, said={"tp": _sequence()}),
    TrueLayout(program="context-parallel", axes={"cp": 2}, said={"cp": _context()}),
    TrueLayout(program="context-parallel", axes={"cp": 4}, said={"cp": _context()}),
    TrueLayout(program="expert-parallel", axes={"ep": 2}, said={"ep": _experts()}),
    TrueLayout(program="expert-parallel", axes={"ep": 4}, said={"ep": _experts()}),
    TrueLayout(
        program="shard-order-at-load",
        axes={"dp": 2, "tp": 2},
        said={"dp": _data(), "tp": _tensor()},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A proposal held to the truth, slot by slot and axis by axis."""

    true: int
    found: int
    wrong: tuple[str, ...]
    unheard: int
    """Proposed of slots of which the true file says nothing."""
    text: str


def proposal_of(pool: RankPool, true: TrueLayout, folder: Path) -> tuple[Trace, str]:
    """Trace a right program and return the trace and the text that is proposed for it."""
    world = 1
    for size in true.axes.values():
        world *= size
    setup = Setup(ranks=world)
    out = traced(pool, ranks.traced, FAULTS, true.program, setup, False, folder=folder, world=world)
    trace = open_trace(out)
    return trace, "\n".join(proposal_lines(propose_layout(trace), "trace"))


def compared(trace: Trace, true: TrueLayout, text: str) -> Comparison:
    """Hold a proposal to the true file."""
    proposed, known = LayoutFile.parse(text), true.file
    count = found = unheard = 0
    wrong = [] if dict(proposed.axes) == dict(true.axes) else [f"axes {dict(proposed.axes)}"]
    slots = {
        (node.path, view.slot)
        for step in [*trace.setup, *trace.steps]
        for node in step.walk()
        for view in node.slots
        if view.dtype != "python" and len(view.ranks) > 1 and "collective" not in node.phase.word
    }
    for path, slot in sorted(slots):
        truth, said = known.placements(path, slot), proposed.placements(path, slot)
        count += len(truth)
        for axis, placement in said.items():
            if axis not in truth:
                unheard += 1
            elif truth[axis] == placement:
                found += 1
            else:
                wrong.append(f"{path}:{slot} {axis}={placement}, in truth {truth[axis]}")
    return Comparison(true=count, found=found, wrong=tuple(wrong), unheard=unheard, text=text)


def table() -> str:
    """Return the table of the page."""
    lines = ["| program | axes | true | found | contradicted |", "|---|---|---|---|---|"]
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
            for number, true in enumerate(TRUE):
                trace, text = proposal_of(pool, true, Path(folder) / str(number))
                found = compared(trace, true, text)
                axes = ",".join(f"{axis}={size}" for axis, size in true.axes.items())
                part = f"{found.found} ({found.found / found.true:.0%})"
                name = f"{true.program} | `{axes}`"
                lines.append(f"| {name} | {found.true} | {part} | {len(found.wrong)} |")
                for each in found.wrong:
                    print(true.program, axes, each, file=sys.stderr)
    finally:
        pool.close()
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
