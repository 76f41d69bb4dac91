"""Which calls of a forward stand between the first and the last layer of a list, while it runs.

A layer is a call of a module with a number for a name (`layers.3`) in which a module below it was
called. Once another layer of its list has come to that, a layer that is not the first is between
the two for good; what was kept in it alone is let go. `calltree` leaves the same calls out of the
files, from the whole tree; here is never one that stays there. There, calls of modules that the
model does not hold are passed over and those of held ones in them count as made outside; here, what
a call of another root makes is no layer and makes none.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Final

from rankscope.agent.recorder import Recorder
from rankscope.capture.describe import Described
from rankscope.capture.reading import ValueNumbers
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.spool.writer import SpoolWriter

__all__ = ["LayerRecorder"]

_NUMBERED: Final = re.compile(r"(.*)\.(\d+)")
_LOOSE: Final = ".@"
"""Begins the path of a module that no root holds."""
_FIRST_AND_LATEST: Final = 2


class _Layer:
    """A call of a module with a number for a name."""

    __slots__ = ("inside", "is_layer", "marker", "place", "references", "sequence")

    def __init__(self, sequence: int, place: tuple[int, str], number: str) -> None:
        self.sequence = sequence
        self.place = place
        """Parent call and path of the list."""
        self.marker = f".{number}."
        """In the path of every module below."""
        self.is_layer = False
        """A module below was called in it."""
        self.inside: list[_Layer] = []
        self.references: list[int] = []
        """Of its values, once for each."""


class LayerRecorder(Recorder):
    """A recorder that has let go of what layers between others kept.

    Only while one thread calls modules: what another has just found to be equal to something kept
    must not be let go before its value is written down.
    """

    def __init__(self, writer: SpoolWriter) -> None:
        super().__init__(writer)
        self._paths: dict[int, str] = {}
        """Of modules, by the number of their definition."""
        self._release: Callable[[int], None] | None = None
        self._drops = threading.RLock()
        self._tops: dict[int, int] = {}
        """By call: the root of the outermost call that it is in."""
        self._layers: dict[int, _Layer] = {}
        """By call: the innermost that it is in, itself included."""
        self._lists: dict[tuple[int, str], list[_Layer]] = {}
        """Layers of a list: the first and the latest."""
        self._uses: dict[int, int] = {}
        """Values by reference."""
        self._unsorted: list[tuple[int, int]] = []
        """Call and reference of values that are not yet counted."""

    def let_go(self, release: Callable[[int], None] | None) -> None:
        """From now on tell `release` the references that only such layers have; None for no
        more.
        """
        with self._drops:
            self._release = release

    def define(self, kind: str, **fields: object) -> int:
        """As `Recorder.define`."""
        number = super().define(kind, **fields)
        if kind == "module":
            self._paths[number] = str(fields["path"])
        return number

    def enter(
        self,
        module: int,
        root: int,
        parent: int | None,
        mode: Mode,
        step: int,
        micro_batch: int | None,
        phase: Phase,
        ordinal: int,
        time_ns: int = 0,
        collective: int = 0,
        number: int = 0,
    ) -> int:
        """As `Recorder.enter`."""
        with self._drops:
            sequence = super().enter(
                module, root, parent, mode, step, micro_batch, phase, ordinal, time_ns, collective,
                number,
            )  # fmt: skip
            if self._release is not None and phase is Phase.FORWARD:
                self._place(sequence, parent, root, f".{self._paths.get(module, '')}")
        return sequence

    def value(
        self,
        sequence: int,
        slot: str,
        described: Described,
        reading: ValueNumbers | None,
        phase: Phase,
        ordinal: int,
        flags: int,
        batch_dim: int,
        reference: int = 0,
    ) -> None:
        """As `Recorder.value`."""
        if reference and self._release is not None:  # first: an interrupt may cost room alone
            self._unsorted.append((sequence, reference))
        super().value(
            sequence, slot, described, reading, phase, ordinal, flags, batch_dim, reference
        )

    def end_step(self) -> None:
        """As `Recorder.end_step`."""
        super().end_step()
        with self._drops:
            self._sort()
            self._layers.clear()
            self._lists.clear()
            self._tops.clear()

    def _place(self, sequence: int, parent: int | None, root: int, path: str) -> None:
        """Note which layer a call is in, and what it makes of that one."""
        if parent is None:
            self._tops[sequence] = root
            return
        top = self._tops.get(parent)
        if top is None:
            return  # its parent is no call of the forward
        self._tops[sequence] = top
        is_held = root == top and not path.startswith(_LOOSE)
        around = self._layers.get(parent)
        if around is not None:
            self._layers[sequence] = around
            is_below = is_held and around.sequence == parent and around.marker in path
            if is_below and not around.is_layer:
                around.is_layer = True
                self._follow(around)
        found = _NUMBERED.fullmatch(path) if is_held else None
        if found is not None:
            layer = self._layers[sequence] = _Layer(sequence, (parent, found[1]), found[2])
            if around is not None:
                around.inside.append(layer)

    def _follow(self, layer: _Layer) -> None:
        """Take one more layer of a list: the one before it is between others, if not the first."""
        known = self._lists.setdefault(layer.place, [])
        if len(known) == _FIRST_AND_LATEST:
            self._sort()
            self._drop(known.pop())
        known.append(layer)

    def _sort(self) -> None:
        """Give the values that came since the last time to the layers they are in."""
        unsorted, self._unsorted = self._unsorted, []
        for sequence, reference in unsorted:
            self._uses[reference] = self._uses.get(reference, 0) + 1
            layer = self._layers.get(sequence)
            if layer is not None:
                layer.references.append(reference)

    def _drop(self, layer: _Layer) -> None:
        if self._release is None or len(self._threads) > 1:
            return
        for inner in layer.inside:
            self._drop(inner)
        for reference in layer.references:
            self._uses[reference] -= 1
            if not self._uses[reference]:
                del self._uses[reference]
                self._release(reference)
        layer.inside, layer.references = [], []
