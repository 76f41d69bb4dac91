"""Which steps are traced: those the setting names, and those a touch of its file asks for."""

from __future__ import annotations

from pathlib import Path

from rankscope.agent.guard import say
from rankscope.agent.recorder import Recorder
from rankscope.agent.steps.touchedfile import TouchedFile
from rankscope.record.call import Mode
from rankscope.record.notes import Note, NoteKind
from rankscope.record.stepselection import StepSelection
from rankscope.spool.recordformat import StepEvent

__all__ = ["ChosenSteps"]


class ChosenSteps:
    """Answers for one rank; where it could not do as the others did, it says and records that."""

    def __init__(self, selection: StepSelection) -> None:
        self._selection = selection
        self._trigger: TouchedFile | None = None
        self._has_begun = False
        """A step that is traced has begun."""

    def watch_file(self, recorder: Recorder, rank: int, step_trigger_folder: Path | None) -> None:
        """Begin to look at the file of `at:FILE`, where the setting has one.

        Args:
            recorder: where missed steps are written down.
            rank: this one's number.
            step_trigger_folder: the folder in which ranks agree; None for a rank that is alone.
        """
        if self._selection.file is None or self._selection.last:
            return  # the relay looks at the file of a black box

        def missed(mode: Mode, step: int, why: str) -> None:
            note = Note.of(NoteKind.MISSED_STEP, why=why)
            recorder.step(StepEvent.NOTE, mode, step, note)
            say(f"rank {rank}: {mode.word} step {step} is {note}")

        def failed(why: str) -> None:
            recorder.error(None, why)
            say(f"rank {rank}: {why}")

        self._trigger = TouchedFile(
            self._selection.file, step_trigger_folder, missed=missed, failed=failed
        )

    def begins(self, mode: Mode, step: int) -> bool:
        """Say, once as it begins, whether a step is traced."""
        is_asked = self._trigger is not None and self._trigger.begins(mode, step)
        is_chosen = is_asked or step in self._selection
        self._has_begun = self._has_begun or is_chosen
        return is_chosen

    def none_traced(self, train: int, evaluated: int) -> Note | None:
        """Return how a job ended none of whose steps was traced; None where one was.

        Args:
            train: the last train step that began, -1 without any.
            evaluated: the last eval step.
        """
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
        is_asked = self._trigger is not None and self._trigger.expects(Mode.TRAIN, step)
        return is_asked or step in self._selection

    def is_over(self, step: int) -> bool:
        """True where no step after `step` can be traced."""
        return self._selection.is_over(step)

    def close(self) -> None:
        """Say which touches this rank never saw."""
        if self._trigger is not None:
            self._trigger.close()
