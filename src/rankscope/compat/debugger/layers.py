"""Which calls of a forward stand between the first and the last layer of a list, while it runs.

A layer is a call of a module with a number for a name (`layers.3`) in which a module below it was
called. Once another layer of its list has come to that, a layer that is not the first is between
the two for good: its calls are left out of the tree, and what was kept in it alone is let go.
`treefiles` leaves the same calls out of the files, from the whole tree; none that stays there is
let go here. There, calls of modules that the model does not hold are passed over and those of held
ones in them count as made outside; here, what a call of another root makes is and makes no layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from rankscope.agent.recorder import Recorder
from rankscope.record.phases import Phase
from rankscope.spool.recordcolumns import Records
from rankscope.spool.recordformat import NO_SEQUENCE, RecordKind, StepEvent
from rankscope.tree.assembly.rankstreams import RankStream

_NUMBERED: Final = re.compile(r"(.*)\.(\d+)")
_LOOSE: Final = ".@"
"""Begins the path of a module that no root holds."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call of this step's forwards; `top` is the root of the outermost call, `references` are
    those of its values. A layer has a call of a module below in it."""

    sequence: int
    path: str
    """Of the module, a dot before every name; "" where the outermost call's root does not hold
    it."""
    parent: _Call | None
    top: int
    inside: list[_Call] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    layers: dict[str, list[_Call]] = field(default_factory=dict)
    """Of each list of layers called in it the first and the latest."""
    is_layer: bool = False


class LayerWatch:
    """Says what layers between others kept, and nothing else did.

    Only while one thread calls modules: what another has just found to be equal to something kept
    must not be let go before its value is written down.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._paths = recorder.modules = {}
        self._lets_go = True
        self._threads: set[int] = set()
        self._calls: dict[int, _Call] = {}
        self._uses = Counter[int]()
        self._passed: list[_Call] = []
        """Layers between others, not let go of yet."""
        self._dropped: list[int] = []
        recorder.observe(self._look)

    def let_go_no_more(self) -> None:
        """Keep from now on what any layer keeps."""
        self._lets_go = False

    def unneeded(self) -> list[int]:
        """Return the references that only layers between others have, each once.

        Asked by the store while no other thread uses it: a thread that has found something equal to
        what is kept has begun a call before, so that call is among those looked at here.
        """
        if not self._recorder.hand_on() or not self._lets_go or len(self._threads) > 1:
            return []
        passed, self._passed = self._passed, []
        return [reference for call in passed for reference in self._drop(call)]

    def without_dropped(self, stream: RankStream) -> RankStream:
        """Return the records without the calls of layers that were let go, and their values: of a
        deep model most of the work would go into them."""
        self.unneeded()
        dropped = np.array(self._dropped, np.uint64)
        if not len(dropped):
            return stream
        left = ~np.isin(stream.values["sequence"], dropped)
        return replace(
            stream,
            enters=stream.enters[~np.isin(stream.enters["sequence"], dropped)],
            exits=stream.exits[~np.isin(stream.exits["sequence"], dropped)],
            values=stream.values.chosen(left),
        )

    def _look(self, batch: Records) -> None:
        if not self._lets_go:
            return
        _, calls = batch.columns(RecordKind.ENTER)
        self._threads.update(calls["thread"].tolist())
        calls = calls[calls["phase"] == Phase.FORWARD]
        columns = (calls[name].tolist() for name in ("sequence", "module", "root", "parent"))
        for sequence, module, root, parent in zip(*columns):
            path = f".{self._paths.get(module, '')}"
            around = self._calls.get(parent)
            if around is not None:
                self._place(sequence, around, root, path)
            elif parent == NO_SEQUENCE:
                self._calls[sequence] = _Call(sequence, path, None, root)
        _, values = batch.values()
        values = values.chosen(values["reference"] > 0)
        for sequence, reference in zip(values["sequence"].tolist(), values["reference"].tolist()):
            self._uses[reference] += 1
            if (call := self._calls.get(sequence)) is not None:
                call.references.append(reference)
        _, marks = batch.columns(RecordKind.STEP)
        if (marks["event"] == StepEvent.END).any():
            self._calls.clear()

    def _place(self, sequence: int, around: _Call, root: int, path: str) -> None:
        is_held = root == around.top and not path.startswith(_LOOSE)
        call = _Call(sequence, path if is_held else "", around, around.top)
        self._calls[sequence] = call
        around.inside.append(call)
        if around.is_layer or around.parent is None:
            return
        found = _NUMBERED.fullmatch(around.path)
        if found and f".{found[2]}." in call.path:
            around.is_layer = True
            layers = around.parent.layers.setdefault(found[1], [])
            if len(layers) > 1:
                self._passed.append(layers.pop())
            layers.append(around)

    def _drop(self, call: _Call) -> Iterator[int]:
        """Let go of a layer and all in it; yield the references that nothing else has."""
        self._dropped.append(call.sequence)
        for reference in call.references:
            self._uses[reference] -= 1
            if not self._uses[reference]:
                del self._uses[reference]
                yield reference
        for inner in call.inside:
            yield from self._drop(inner)
        call.inside, call.references = [], []
