"""Which calls of a forward stand between the first and the last layer of a list, while it runs.

A layer is a call of a module with a number for a name (`layers.3`) in which a module below it was
called. Once another layer of its list has come to that, a layer that is not the first is between
the two for good: its calls are left out of the tree, and what was kept in it alone is let go.
`calltree` leaves the same calls out of the files, from the whole tree; here is never one that stays
there. There, calls of modules that the model does not hold are passed over and those of held ones
in them count as made outside; here, what a call of another root makes is no layer and makes none.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from rankscope.agent.recorder import Recorder
from rankscope.assembly.rankstreams import RankStream
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.spool.recordformat import StepEvent

_NUMBERED: Final = re.compile(r"(.*)\.(\d+)")
_LOOSE: Final = ".@"
"""Begins the path of a module that no root holds."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call of this step's forwards."""

    sequence: int
    path: str
    """Of the module, a dot before every name; "" where the root of the outermost call does not
    hold it."""
    parent: _Call | None
    top: int
    """Root of the outermost call."""
    inside: list[_Call] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    """Of its values, once for each."""
    layers: dict[str, list[_Call]] = field(default_factory=dict)
    """Of each list of layers called in it the first and the latest."""
    is_layer: bool = False
    """A module below was called in it."""


class LayerWatch:
    """Has let go of what layers between others kept.

    Only while one thread calls modules: what another has just found to be equal to something kept
    must not be let go before its value is written down.
    """

    def __init__(self, recorder: Recorder, release: Callable[[int], None]) -> None:
        """Tell `release` the references that only such layers have."""
        self._release: Callable[[int], None] | None = release
        self._threads: set[int] = set()
        """Those that have called modules."""
        self._paths: dict[int, str] = {}
        """Of modules, by the number of their definition."""
        self._drops = threading.RLock()
        self._calls: dict[int, _Call] = {}
        """Of this step, by sequence."""
        self._uses = Counter[int]()
        """Values by reference."""
        self._dropped: list[int] = []
        """Calls of layers that were let go."""
        recorder.on_module.append(self._paths.__setitem__)
        recorder.on_call.append(self._call_began)
        recorder.on_kept.append(self._value_kept)
        recorder.on_step.append(self._step_marked)

    def let_go_no_more(self) -> None:
        """Keep from now on what any layer keeps."""
        with self._drops:
            self._release = None

    def without_dropped(self, stream: RankStream) -> RankStream:
        """Return the records without the calls of layers that were let go, and their values: of a
        deep model most of the work would go into them."""
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

    def _call_began(
        self, sequence: int, module: int, root: int, parent: int | None, _mode: Mode, _step: int,
        phase: Phase,
    ) -> None:  # fmt: skip
        with self._drops:
            self._threads.add(threading.get_ident())
            if self._release is not None and phase is Phase.FORWARD:
                path = f".{self._paths.get(module, '')}"
                around = None if parent is None else self._calls.get(parent)
                if around is not None:
                    self._place(sequence, around, root, path)
                elif parent is None:
                    self._calls[sequence] = _Call(sequence, path, None, root)

    def _value_kept(self, sequence: int, reference: int) -> None:
        if self._release is not None:
            self._uses[reference] += 1  # before it is written: an interrupt may cost room alone
            if (call := self._calls.get(sequence)) is not None:
                call.references.append(reference)

    def _step_marked(self, event: StepEvent, _mode: Mode, _step: int) -> None:
        if event is StepEvent.END:
            with self._drops:
                self._calls.clear()

    def _place(self, sequence: int, around: _Call, root: int, path: str) -> None:
        """Note a call inside another, which may become a layer by that."""
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
                self._drop(layers.pop())
            layers.append(around)

    def _drop(self, call: _Call) -> None:
        """Let go of a layer and all in it, unless another thread may be keeping the same."""
        if self._release is None or len(self._threads) > 1:
            return
        self._dropped.append(call.sequence)
        for reference in call.references:
            self._uses[reference] -= 1
            if not self._uses[reference]:
                del self._uses[reference]
                self._release(reference)
        for inner in call.inside:
            self._drop(inner)
        call.inside, call.references = [], []
