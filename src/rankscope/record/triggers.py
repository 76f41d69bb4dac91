"""What makes ranks that hold their last steps back (`--rs-steps last:N`) send them: the only list.

A trigger is a row here and the place that sees it happen, which tells it to the board of events
(`run.agreements`). Notes, `completeness.asked`, `--rs-steps` and the help follow from the row.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rankscope.errors import SettingError


def _factor(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or 0 < float(text) <= 1:
        raise SettingError(
            f"'spike:{text}' wants a factor above 1, like spike:10, or 0 for no look at gradients"
        )
    return float(text)


def _glob(text: str) -> str:
    if not text or text.endswith(":"):
        raise SettingError(f"'watch:{text}' wants a value, path:slot, like watch:lm_head:output")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerFacts:
    """One row of the table."""

    meaning: str
    words: str
    """Sentence of the note at its step, fields in braces."""
    otherwise: str = ""
    """Sentence for a job in which it did not happen."""
    is_end: bool = False
    """Ends or stops a life of the job, at most once, and always finds room among the events. One
    rank's step stands for all ranks, though some may be a little ahead."""
    option: str = ""
    """As `--rs-steps last:N` takes it: `spike:K`."""
    parse: Callable[[str], Any] = str
    default: str = ""
    """Value without the option; "" for a trigger that then never fires."""


class Trigger(enum.Enum):
    """What happens. The names stand in records and traces: append new ones, never rename."""

    ENDED = TriggerFacts(
        meaning="a rank raises, is killed, or leaves without a word",
        words="{ranks}",
        otherwise="no rank crashed or was killed",
        is_end=True,
    )
    STALLED = TriggerFacts(
        meaning="no rank of a host moves for --rs-stall-seconds",
        words="{ranks} stood still",
        otherwise="none stood still",
        is_end=True,
    )
    VANISHED = TriggerFacts(meaning="a host is gone without a word", words="{text}", is_end=True)
    INTERRUPTED = TriggerFacts(
        meaning="a signal ends the job", words="{signal} ended the job", is_end=True
    )
    NONFINITE = TriggerFacts(
        meaning="a value of a forward, a parameter, or a gradient before its optimizer is NaN or "
        "+inf",
        words="rank {rank}: {slot} is not finite",
        otherwise="all values were finite",
    )
    SPIKE = TriggerFacts(
        meaning="the norm of a rank's gradients is beyond 10 times its running median (spike:K for "
        "K times, 0 for never)",
        words="rank {rank}: gradient norm {norm:.4g}, {times:.3g} times its running median",
        otherwise="no gradient norm leapt",
        option="spike:K",
        parse=_factor,
        default="10",
    )
    WATCHED = TriggerFacts(
        meaning="a value that watch:PATH:SLOT names is beyond as many times its running median",
        words="rank {rank}: {value} is {magnitude:.4g} in step {step}, "
        "{times:.3g} times its running median {median:.4g}",
        otherwise="no watched value leapt",
        option="watch:PATH:SLOT",
        parse=_glob,
    )
    TOUCHED = TriggerFacts(
        meaning="somebody touches the file of at:FILE",
        words="{file} was touched ({time})",
        otherwise="{file} was not touched",
    )
    ORDERED = TriggerFacts(
        meaning="somebody gives `rankscope capture`",
        words="rankscope capture asked for it ({number})",
    )
    RECOVERED = TriggerFacts(
        meaning="`rankscope recover` finds no event of a job whose companion is gone",
        words="rankscope recover asked for it",
        is_end=True,
    )

    @property
    def word(self) -> str:
        """The trigger as boards and traces spell it."""
        return self.name.lower()

    def text(self, **fields: object) -> str:
        """Return the trigger's sentence with these fields."""
        return self.value.words.format(**fields)


TRIGGER_WORDS: Final = {
    trigger.value.option.partition(":")[0]: trigger for trigger in Trigger if trigger.value.option
}
