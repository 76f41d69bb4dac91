"""Values that are no fault by themselves, but would explain one behind them."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.diagnosis.comparison.comparedvalue import ComparedValue
from rankscope.diagnosis.stepview import CallView
from rankscope.record.phases import Phase

__all__ = ["PendingValues"]


class PendingValues:
    """Values that are no fault by themselves, but would explain one behind them.

    * Summands: what each rank holds differs and makes the reference's value together. A right
      program reduces it before it is used.
    * Gradients that one side counts at another tensor: `grad_input` is the total of one tensor. A
      module that was handed a copy (a DTensor made of a plain tensor) has its own share alone. What
      is computed from the total next is right then.
    """

    def __init__(self, compared: Sequence[ComparedValue]) -> None:
        self._next: dict[int, ComparedValue] = {}
        """Of gradients of inputs: the next gradient of an output that is known."""
        following: ComparedValue | None = None
        for index in range(len(compared) - 1, -1, -1):
            each = compared[index]
            if each.key.phase is not Phase.BACKWARD or each.difference is None:
                continue
            if each.value.is_input:
                following = each
            elif following is not None:
                self._next[index] = following
        self._compared = compared
        self._summands: ComparedValue | None = None
        self._given: set[CallView] = set()
        """Calls that were given summands."""
        self._given_to: dict[str, ComparedValue] = {}
        """Where the summands began that backward of a module was given, by its path."""
        self._explained = self._explained_by_others()
        self._gradients: dict[tuple[str, str], ComparedValue] = {}
        self._elsewhere: list[ComparedValue] = []

    def summands(self, each: ComparedValue) -> None:
        """Take a value that ranks hold as summands."""
        if each.key.phase is Phase.GRADS:
            name = each.key.parameter
            self._gradients[name] = self._given_to.get(each.key.path, each)
        else:
            self._summands = self._summands or each
            if each.value.is_input:
                self._given.add(each.value.call)
                if each.key.phase is Phase.BACKWARD:
                    self._given_to.setdefault(each.key.path, self._summands)

    def _explained_by_others(self) -> set[int]:
        """Return the indices of totals of one tensor that are wrong because another module, which
        uses that tensor too and comes later, was given a wrong gradient."""
        tensors: dict[tuple[str, int, str], bytes] = {}
        totals: dict[tuple[bytes, bytes], list[int]] = {}
        given: set[CallView] = set()
        for index, each in enumerate(self._compared):
            key, difference = each.key, each.difference
            if difference is None:
                continue
            if key.phase is Phase.FORWARD:
                tensors[key.path, key.ordinal, key.slot] = difference.dots.tobytes()
            elif key.phase is Phase.BACKWARD and each.error > each.allowed:
                tensor = tensors.get((key.path, key.ordinal, key.slot.removeprefix("grad_")))
                if each.value.is_input:
                    given.add(each.value.call)
                elif tensor is not None and not difference.partial:
                    totals.setdefault((tensor, difference.dots.tobytes()), []).append(index)
        found: set[int] = set()
        for same in totals.values():
            calls = [self._compared[index].value.call for index in same]
            for place, index in enumerate(same):
                if calls[place] not in given and any(
                    later in given and not _is_within(calls[place], later)
                    for later in calls[place + 1 :]
                ):
                    found.add(index)
        return found

    def is_due_to_another(self, index: int) -> bool:
        """True for the total of a tensor that another module's part makes wrong."""
        return index in self._explained

    def is_left_unreduced(self, each: ComparedValue) -> bool:
        """True for a parameter that ranks step with gradients of their own, so that it is another
        one on each of them."""
        return (
            each.key.phase is Phase.PARAMS
            and each.difference is not None
            and len(each.difference.members) > 1
            and not each.difference.is_exact.all()
            and self.earlier_than(each) is not None
        )

    def is_counted_elsewhere(self, index: int) -> bool:
        """True for a wrong gradient of an input where what is computed next is right."""
        each, following = self._compared[index], self._next.get(index)
        if following is None or each.error <= each.allowed or following.error > following.allowed:
            return False
        self._elsewhere.append(each)
        return True

    def earlier_than(self, each: ComparedValue) -> ComparedValue | None:
        """Return the value that explains a new origin, None where there is none."""
        if each.key.phase is Phase.PARAMS:
            return self._gradients.get(each.key.parameter)
        if not each.value.is_input:
            return self._summands if each.value.call in self._given else None
        if each.key.phase is Phase.BACKWARD:
            alike = (e for e in self._elsewhere if abs(e.error - each.error) <= 1e-3 * each.error)
            return next(alike, None) or self._summands
        return self._summands

    def passed(self, each: ComparedValue) -> None:
        """Forget summands once something behind them is right."""
        if each.error <= each.allowed and not each.value.is_input:
            self._summands = None


def _is_within(call: CallView, other: CallView) -> bool:
    """True where one call is made inside another."""
    around = call.parent
    while around is not None and around is not other:
        around = around.parent
    return around is other
