"""Which steps are traced: those of the setting, of a touch of its file, or of an order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rankscope.agent.guard import say
from rankscope.agent.recorder import Recorder
from rankscope.record.call import Mode
from rankscope.record.notes import Note, NoteKind
from rankscope.record.stepselection import StepSelection
from rankscope.run.agreements import (
    ABSENT,
    OVER,
    STANDS,
    Order,
    agree,
    agreed_text,
    file_time,
    is_taken_before,
    order_in,
)
from rankscope.spool.recordformat import StepEvent

LEAD = 2
"""Steps from the one in which a touch is seen first to the one that all ranks trace: ranks that
wait for each other once a step are never further apart."""
_SKEW_S = 0.5
"""Largest difference between the times at which hosts see one order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Where ranks agree on steps that are asked for while the job runs."""

    is_alone: bool = True
    is_distant: bool = False
    """Ranks of other hosts see an order at other times."""
    for_touches: Path | None = None
    """Folder in which ranks agree on touches; None for a single rank."""
    for_orders: Path | None = None
    """Folder in which ranks agree on orders; None where no order can reach this rank."""
    order_file: Path = Path()


class ChosenSteps:
    """Answers for one rank; where it could not do as the others did, it says and records that."""

    def __init__(self, selection: StepSelection) -> None:
        self._selection = selection
        self._files: list[TouchedFile] = []
        self._ordered: dict[Mode, tuple[Order, ...]] = {}
        self._has_begun = False

    @property
    def ordered(self) -> tuple[Order, ...]:
        """The orders that ask for the steps that run."""
        return tuple(order for orders in self._ordered.values() for order in orders)

    def watch_files(self, recorder: Recorder, rank: int, agreement: Agreement) -> None:
        """Begin to look at the file of `at:FILE`, where the setting has one, and for orders."""
        if self._selection.last:
            return  # the relay looks for both

        def missed(mode: Mode, step: int, why: str) -> None:
            note = Note.of(NoteKind.MISSED_STEP, why=why)
            recorder.step(StepEvent.NOTE, mode, step, note)
            say(f"rank {rank}: {mode.word} step {step} is {note}")

        def failed(why: str) -> None:
            recorder.error(None, why)
            say(f"rank {rank}: {why}")

        if self._selection.file is not None:
            file, folder = self._selection.file, agreement.for_touches
            self._files.append(TouchedFile(file, folder, missed=missed, failed=failed))
        if agreement.for_orders is not None:
            orders = TouchedFile(
                agreement.order_file, agreement.for_orders, missed=missed, failed=failed,
                is_alone=agreement.is_alone, is_distant=agreement.is_distant, holds_orders=True,
            )  # fmt: skip
            self._files.append(orders)

    def begins(self, mode: Mode, step: int) -> bool:
        """Say, once as it begins, whether a step is traced."""
        asking = [file for file in self._files if file.begins(mode, step)]
        if mode is Mode.TRAIN:
            self._ordered.clear()
        self._ordered[mode] = tuple(order for file in asking for order in file.orders)
        is_chosen = bool(asking) or step in self._selection
        self._has_begun = self._has_begun or is_chosen
        return is_chosen

    def none_traced(self, train: int, evaluated: int) -> Note | None:
        """Return how a job ended without a traced step, given its last steps (-1 for none)."""
        if self._has_begun:
            return None
        ends = [
            f"step {step} ({mode.word})"
            for mode, step in ((Mode.TRAIN, train), (Mode.EVAL, evaluated))
            if step >= 0
        ]
        steps = self._selection.text
        if not ends:
            return Note.of(NoteKind.NO_STEP_BEGUN, steps=steps)
        return Note.of(NoteKind.NO_STEP_REACHED, last=" and ".join(ends), steps=steps)

    def expects(self, step: int) -> bool:
        """Say whether a train step is going to be traced, as far as is known before it begins."""
        is_asked = any(file.expects(Mode.TRAIN, step) for file in self._files)
        return is_asked or step in self._selection

    def is_over(self, step: int) -> bool:
        """True where no step after `step` can be traced."""
        return not self._files and self._selection.is_over(step)

    def close(self) -> None:
        """Say which touches and orders this rank never saw."""
        for file in self._files:
            file.close()


# ---- what asks for steps while the job runs ------------------------------------------------------


class _PlannedTouch(NamedTuple):
    touch: int
    attempt: int
    order: Order | None


class _Run(NamedTuple):
    touch: int
    mode: Mode
    last: int
    order: Order | None


class TouchedFile:
    """One rank's eye on the file of `at:FILE`: a touch makes all ranks trace one step. An order
    of `rankscope capture` is a touch that says how many steps, and with what. Nothing here raises:
    a rank that cannot agree says so, once.

    Ranks see a touch at different moments. They agree by entries in a folder that all of them see:
    the first rank to make an entry decides what it says. Touches are numbered, so a rank that slept
    through one still learns of it.

        0     the time FILE bears before any touch counts, -1 where it does not exist
        1     the first touch: "train 42 1732190000": trace train step 42
        1.1   "stands" where a rank began step 42 first, or "45" where one was too late for it and
              made it step 45 before anybody had begun; then 1.2 is asked for at step 45, and so on
        2     the second touch

    An entry is a symbolic link to its text: made in one call, whole or not at all, on every shared
    disk. The entry of an order holds the order behind the time. An order asks for several steps in
    a row: the first is agreed on, and `1.over` says that a rank has ended the last. Orders have no
    entry 0: they count though they were made before the first step.
    """

    def __init__(
        self,
        file: Path,
        folder: Path | None,
        *,
        missed: Callable[[Mode, int, str], None],
        failed: Callable[[str], None],
        is_alone: bool = False,
        is_distant: bool = False,
        holds_orders: bool = False,
    ) -> None:
        """Begin to look; touches before the first rank did so do not count.

        Args:
            folder: where the ranks agree, made if missing; None for touches of a rank alone.
            missed: takes mode, step and why of a step that other ranks traced and this one did not.
            failed: takes why touches are no longer answered here.
            is_distant: ranks of other hosts see an order at other times.
            holds_orders: `file` holds orders, and `folder` lies in one made with the first order.
        """
        self._path = str(file)
        self._holds_orders, self._is_distant = holds_orders, is_distant
        self._touch_time_ns = file_time(file)
        self._folder = folder
        self._missed = missed
        self._failed = failed
        self._is_off = False
        self._lead = 0 if is_alone or folder is None else LEAD
        self._last_begun = dict.fromkeys(Mode, -1)
        self._last_planned = dict.fromkeys(Mode, -1)
        self._planned: dict[tuple[Mode, int], list[_PlannedTouch]] = {}
        self._runs: list[_Run] = []
        self.orders: tuple[Order, ...] = ()
        self._pace = (0.0, Mode.TRAIN, 0)
        """When a step of this mode began about a second ago: shows how fast steps are."""
        self._next_touch = 1
        self._seen_ns = ABSENT
        if not holds_orders:
            self._seen_ns = self._touch_time_ns()
            try:
                if folder is not None:
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._seen_ns = int(self._agree("0", str(self._seen_ns)))
            except OSError as error:
                self._give_up(error)
        self._times = {self._seen_ns}

    def begins(self, mode: Mode, step: int) -> bool:
        """Note the begin of a step; True if a touch asks for it."""
        self._last_begun[mode] = step - 1  # the step itself may still be planned
        is_asked = False
        if not self._is_off:
            try:
                if self._is_distant:
                    self._keep_pace(mode, step)
                touch_ns = self._touch_time_ns()
                if touch_ns != self._seen_ns and touch_ns != ABSENT and self._counts(mode):
                    self._seen_ns = touch_ns
                    self._see(touch_ns, mode, step)
                if self._planned or self._runs:
                    self.orders = ()
                    is_asked = self._stands(mode, step)
            except OSError as error:
                self._give_up(error)
        self._last_begun[mode] = step
        return is_asked

    def expects(self, mode: Mode, step: int) -> bool:
        """True where this step is planned, as far as this rank knows by now."""
        return (mode, step) in self._planned or any(
            run.mode is mode and step <= run.last for run in self._runs
        )

    def close(self) -> None:
        """Say which steps other ranks traced for touches that were never seen from here."""
        if not self._is_off:
            try:
                for run in self._runs:
                    if self._last_begun[run.mode] >= run.last:
                        self._end(run)
            except OSError as error:
                self._give_up(error)
        number = self._next_touch
        while (text := self._read(str(number))) is not None:
            mode, step, _, order = _plan(text)
            attempt = 1
            while (answer := self._read(f"{number}.{attempt}")) not in (None, STANDS):
                step, attempt = int(answer or step), attempt + 1
            if answer == STANDS:
                self._miss(mode, step, order, f"{self._trigger_text} was not seen here")
            number += 1

    @property
    def _trigger_text(self) -> str:
        return "the order" if self._holds_orders else f"the touch of {self._path}"

    def _miss(self, mode: Mode, first: int, order: Order | None, why: str) -> None:
        last = first + (1 if order is None else order.steps) - 1
        for step in range(first, min(last, self._last_begun[mode]) + 1):
            self._missed(mode, step, why)

    def _counts(self, mode: Mode) -> bool:
        """An eval step answers a touch only where this process has not trained yet."""
        return mode is Mode.TRAIN or self._last_begun[Mode.TRAIN] < 0

    def _give_up(self, error: OSError) -> None:
        self._is_off = True
        subject = "orders" if self._holds_orders else f"touches of {self._path}"
        self._failed(f"{subject} are not answered on this rank: {error}")

    def _keep_pace(self, mode: Mode, step: int) -> None:
        """Note the pace of steps: an order's first step must be so far ahead that the last host
        sees it in time."""
        now = time.monotonic()
        since, of_mode, at = self._pace
        seconds = now - since
        if of_mode is not mode or step < at or seconds > 60:
            self._pace = (now, mode, step)
        elif seconds >= 1:
            self._lead = LEAD + math.ceil((step - at) / seconds * _SKEW_S)
            self._pace = (now, mode, step)
        elif step - at > self._lead:  # so many in less than a second
            self._lead = step - at

    # ------------------------------------------------------------------ agreeing

    def _see(self, touch_ns: int, mode: Mode, step: int) -> None:
        """Take a touch, or an order that ended with no earlier life of the job."""
        if not self._holds_orders or self._folder is None:
            self._learn(touch_ns, "", mode, step)
            return
        order = order_in(Path(self._path).parent)
        if order is None or is_taken_before(self._folder, order.number):
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._learn(order.number, order.text, mode, step)

    def _learn(self, touch_ns: int, words: str, mode: Mode, step: int) -> None:
        """Read the touches seen by other ranks, up to this one; decide if none has seen it."""
        while touch_ns not in self._times:
            # never inside the steps of an earlier touch: each touch has steps of its own
            ahead = max(step + self._lead, self._last_planned[mode] + 1)
            touch = self._next_touch
            text = self._agree(str(touch), f"{mode.word} {ahead} {touch_ns} {words}".rstrip())
            where, planned_step, agreed_ns, order = _plan(text)
            self._times.add(agreed_ns)
            self._next_touch += 1
            self._plan(where, planned_step, _PlannedTouch(touch, 1, order))

    def _plan(self, mode: Mode, step: int, asked: _PlannedTouch) -> None:
        """Wait for a step; where it has begun here already, put it off for everybody."""
        touch, attempt, order = asked
        last = 0 if order is None else order.steps - 1
        while step <= self._last_begun[mode]:
            # proposed to all: whoever answers this attempt first decides it for every rank
            later = self._last_begun[mode] + 1 + self._lead
            answer = self._agree(f"{touch}.{attempt}", str(later))
            if answer == STANDS:
                self._miss(mode, step, order, f"this rank saw {self._trigger_text} too late")
                self._runs.append(_Run(touch, mode, step + last, order))
                return
            step, attempt = int(answer), attempt + 1
        self._planned.setdefault((mode, step), []).append(_PlannedTouch(touch, attempt, order))
        self._last_planned[mode] = max(self._last_planned[mode], step + last)

    def _stands(self, mode: Mode, step: int) -> bool:
        """True where every rank traces this step, or says that it could not."""
        for asked in self._planned.pop((mode, step), ()):
            answer = self._agree(f"{asked.touch}.{asked.attempt}", STANDS)
            if answer == STANDS:
                last = step if asked.order is None else step + asked.order.steps - 1
                self._runs.append(_Run(asked.touch, mode, last, asked.order))
            else:
                self._plan(mode, int(answer), asked._replace(attempt=asked.attempt + 1))
        is_traced = False
        for run in [run for run in self._runs if run.mode is mode]:
            if step > run.last:
                self._runs.remove(run)
                self._end(run)
                continue
            is_traced = True
            if run.order is not None:
                self.orders += (run.order,)
        return is_traced

    def _end(self, run: _Run) -> None:
        if run.order is not None:
            self._agree(f"{run.touch}.{OVER}", str(run.last))

    def _agree(self, name: str, text: str) -> str:
        return text if self._folder is None else agree(self._folder, name, text)

    def _read(self, name: str) -> str | None:
        return None if self._folder is None else agreed_text(self._folder, name)


def _plan(text: str) -> tuple[Mode, int, int, Order | None]:
    """Take the entry of a touch apart: mode, step, time of the file, order."""
    mode, step, touch_ns, *words = text.split(" ", 3)
    return Mode[mode.upper()], int(step), int(touch_ns), Order.read(words[0]) if words else None
