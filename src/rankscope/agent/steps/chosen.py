"""Which steps are traced: those of the setting, of a touch of its file, or of an order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankscope.agent.guard import say
from rankscope.agent.recorder import Recorder
from rankscope.agent.steps.touchedfile import TouchedFile
from rankscope.record.call import Mode
from rankscope.record.notes import Note, NoteKind
from rankscope.record.stepselection import StepSelection
from rankscope.run.orders import Order
from rankscope.spool.recordformat import StepEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Where ranks agree on steps that are asked for while the job runs."""

    is_alone: bool = True
    is_distant: bool = False
    """Ranks of other hosts see an order at other times."""
    for_touches: Path | None = None
    """Folder, None for a rank that is alone."""
    for_orders: Path | None = None
    """Folder, None where nobody would hand this rank an order."""
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
        self._ordered[mode] = tuple(order for file in asking for order in file.asked)
        is_chosen = bool(asking) or step in self._selection
        self._has_begun = self._has_begun or is_chosen
        return is_chosen

    def none_traced(self, train: int, evaluated: int) -> Note | None:
        """Return how a job ended none of whose steps was traced; None where one was. The last steps
        of either mode are -1 where none began."""
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
