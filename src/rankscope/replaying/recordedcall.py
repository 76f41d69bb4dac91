"""A recorded call as a module is handed it: full tensors, and arguments as they were nested."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import torch

from rankscope.errors import LayoutError, ReplayError, SelectionError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.value import is_form
from rankscope.tree.selection import named
from rankscope.tree.slotview import SlotView, by_slot
from rankscope.tree.tensors.globalvalues import local_tensor, whole_value
from rankscope.tree.views import Trace, Value

_OF_TORCH: Final = re.compile(r"torch\.(\w+)")
_NUMBERS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class RecordedCall:
    """One call of the trace, whose tensors are read."""

    def __init__(
        self,
        trace: Trace,
        path: str,
        step: int,
        rank: int | None,
        mode: Mode | str | None,
        micro_batch: int,
        ordinal: int,
        layouts: LayoutFile | None,
    ) -> None:
        """Find it.

        Raises:
            SelectionError: there is no such call; says what there is.
        """
        wanted = trace.default_mode if mode is None else named(Mode, "mode", mode)
        nodes = (
            node
            for group in reversed(trace.steps)
            if group.step == step and group.mode is wanted
            for node in group.walk()
            if node.phase is Phase.FORWARD
            and (node.path, node.micro_batch, node.ordinal) == (path, micro_batch, ordinal)
        )
        node = next(nodes, None)
        if node is None:  # the trace has no such value either, and says what it has
            which = {"step": step, "micro_batch": micro_batch, "ordinal": ordinal}
            node = trace.value(path, "output", phase=Phase.FORWARD, mode=wanted, **which).node
        self.node = node
        self.rank, self._layouts = rank, layouts
        if rank is not None and rank not in self.node.ranks:
            raise SelectionError(
                f"rank {rank} did not call {path or '(root)'} in {self.words}; "
                f"{ranks_named(self.node.ranks)} did"
            )
        self.used: set[int] = set() if rank is None else {rank}
        self.notes: list[str] = []

    @property
    def words(self) -> str:
        """Which call this is."""
        node = self.node
        again = f", call {node.ordinal}" if node.ordinal else ""
        return f"forward of {node.head.words}, micro-batch {node.micro_batch}{again}"

    def slots(self, kind: str) -> list[str]:
        """Return the names of the slots of one kind that hold tensors."""
        own = self._of(kind).items()
        return [slot for slot, views in own if views[0].dtype != "python"]

    def others(self, kind: str) -> dict[str, str]:
        """Return {slot: text} of the slots of one kind that hold no tensors."""
        tensors = self.slots(kind)
        return {slot: self.note(slot) or "None" for slot in self._of(kind) if slot not in tensors}

    def _of(self, kind: str) -> dict[str, list[SlotView]]:
        slots = by_slot(self.node.slots)
        return {slot: own for slot, own in slots.items() if slot.partition(".")[0] == kind}

    def value(self, slot: str) -> Value:
        """Return the value of a slot that the call has."""
        found = self.node.value(slot)
        assert found is not None
        return found

    def tensor(self, slot: str) -> torch.Tensor:
        """Return the full tensor of one slot: the rank's, or the global one.

        Raises:
            SelectionError: it was not kept.
            LayoutError: nothing says how the ranks' pieces belong together.
            TraceError: its bytes are damaged.
        """
        value = self.value(slot)
        try:
            if self.rank is not None:
                return local_tensor(value, self.rank, is_checked=True)
            whole = whole_value(value, self._layouts)
        except SelectionError as error:
            keep = f"a replay needs all of the call: --rs-tensors '{self.node.path}:*'"
            raise SelectionError(str(error), keep) from None
        except LayoutError as error:
            text = str(error).replace("--rank ", "rank=").replace("--layout FILE", "layouts=")
            raise LayoutError(text) from None
        self.used.update(whole.ranks)
        self.notes += [f"{slot}: {text}" for text in whole.remarks]
        return whole.tensor

    def note(self, slot: str) -> str | None:
        """Return the text of a slot that holds no tensor; None where there is no such slot."""
        found = self.node.value(slot)
        folds = [fold for view in found.views for fold in view.pieces] if found else []
        own = (fold for fold in folds if self.rank is None or self.rank in fold.ranks)
        return next((fold.note for fold in own), None)


class ReplayInputs:
    """Makes the arguments of a call of what was recorded."""

    def __init__(
        self,
        call: RecordedCall,
        given: Mapping[int | str, object],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        self._call, self._given = call, given
        self._device, self._dtype = device, dtype

    def made(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return positional and keyword arguments.

        Raises:
            SelectionError: a tensor was not kept, or no inputs were recorded.
            ReplayError: an argument that is no tensor has to be given.
        """
        form = self._form()
        by_place = dict(enumerate(form["args"]))
        made: dict[int | str, object] = {
            key: self._given[key] if key in self._given else self._of(each, key)
            for key, each in (*by_place.items(), *form["kwargs"].items())
        }
        made |= self._given
        places = sorted(key for key in made if isinstance(key, int))
        if places != [*range(len(places))]:
            raise ReplayError(
                f"arguments= names position {places[-1]}, and there is none before it"
            )
        named_ones = {key: each for key, each in made.items() if isinstance(key, str)}
        return tuple(made[place] for place in places), named_ones

    def _form(self) -> dict[str, Any]:
        text = self._call.note("form:input")
        if text is not None:
            found: dict[str, Any] = json.loads(text)
            return found
        slots = dict.fromkeys(view.slot for view in self._call.node.slots)
        names = [slot.partition(".")[2] for slot in slots if slot.startswith("input.")]
        path = self._call.node.path
        if not names and not any(is_form(slot) for slot in slots) and not self._given:
            raise SelectionError(
                f"no inputs of {path or '(root)'} were recorded; trace again with --rs-slots '*' "
                f"and --rs-tensors '{path}'"
            )
        nested = sorted({name.partition(".")[0] for name in names if "." in name})
        lacking = [n for n in nested if (int(n) if n.isdecimal() else n) not in self._given]
        if lacking:
            raise ReplayError(
                f"arguments {', '.join(lacking)} of {path or '(root)'} hold several tensors, and "
                f"the trace does not say how",
                f"give them with arguments=, or trace again with --rs-tensors '{path}', which "
                f"takes the slot form:input too",
            )
        tops = dict.fromkeys(name.partition(".")[0] for name in names)
        forms = {top: self._flat_form(f"input.{top}") for top in tops}
        return {
            "args": [form for top, form in forms.items() if top.isdecimal()],
            "kwargs": {top: form for top, form in forms.items() if not top.isdecimal()},
        }

    def _flat_form(self, slot: str) -> object:
        value = self._call.node.value(slot)
        is_text = value is None or value.dtype == "python"
        return self._call.note(slot) or "None" if is_text else {"slot": slot}

    def _of(self, form: object, name: int | str) -> object:
        """Return what a form (docs/trace-format.md) describes in an argument of that name."""
        if isinstance(form, list):
            return tuple(self._of(each, name) for each in form)
        if isinstance(form, dict):
            if "items" in form:
                return {key: self._of(each, name) for key, each in form["items"].items()}
            return self._tensor(form)
        return self._read(str(form), name)

    def _tensor(self, form: Mapping[str, Any]) -> torch.Tensor:
        tensor = self._call.tensor(form["slot"])
        is_cast = self._dtype is not None and tensor.is_floating_point()
        made = tensor.to(self._device, self._dtype if is_cast else None, copy=True)
        stride = form.get("stride")
        if stride and self._call.rank is not None and len(stride) == made.ndim and min(stride) > 0:
            # kernels may add in another order where a tensor is not in row-major order
            laid = torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device)
            return laid.copy_(made)
        return made

    def _read(self, text: str, name: int | str) -> object:
        if text in _NUMBERS:
            return _NUMBERS[text]
        of_torch = _OF_TORCH.fullmatch(text)
        if of_torch and isinstance(getattr(torch, of_torch[1], None), (torch.dtype, torch.layout)):
            return getattr(torch, of_torch[1])
        if text.startswith("device("):
            return self._device
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ReplayError(
                f"argument {name} of {self._call.node.path or '(root)'} is no tensor, and the "
                f"trace holds its text alone: {text}",
                f"give it with arguments={{{name!r}: ...}}",
            ) from None
