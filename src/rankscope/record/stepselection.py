"""Which steps are traced: ranges, periods, all, one whenever a file is touched, or the last before
something happens; and what makes ranks that hold their last steps back (`--rs-steps last:N`) send
them: the only list. No torch.

A trigger is a row here and the place that sees it happen, which tells it to the board of events
(`run.agreements`). Notes, `completeness.asked`, `--rs-steps` and the help follow from the row.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankscope.errors import SettingError
from rankscope.record.ranks import LEAST_BLACK_BOX_BYTES


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


_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST_DIGITS = 9
"""Digits of the largest step number: records have 32 bits for it."""
_OPTIONS = ", ".join(["at:FILE", *(trigger.value.option for trigger in TRIGGER_WORDS.values())])
LAST_HELP = f"alone or with {_OPTIONS}"
_HOW = (
    "write 0-2,10 or every:100 or all or at:FILE, or several of them with commas; "
    f"or last:N, {LAST_HELP}"
)


@dataclass(frozen=True, slots=True)
class StepSelection:
    """The setting `steps`; `agent.steps.chosen` is for what a file asks while the job runs."""

    text: str
    """As a command line would give it, its file with the whole path."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Inclusive on both ends."""
    periods: tuple[int, ...] = ()
    file: Path | None = None
    """Each touch of this file asks for one step; with `last`, for the steps before it."""
    last: int = 0
    """Every step is recorded, and this many are held until an event; 0 for none."""
    given: Mapping[Trigger, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    """With `last`: what each trigger's option says, as often as it is given."""

    def __contains__(self, step: int) -> bool:
        return (
            self.last > 0
            or any(step % period == 0 for period in self.periods)
            or any(first <= step <= last for first, last in self.ranges)
        )

    def is_over(self, step: int) -> bool:
        """True where no step after `step` can ever be selected."""
        return not (self.periods or self.file or self.last) and all(
            last <= step for _, last in self.ranges
        )

    def waits_for(self, trigger: Trigger) -> bool:
        """True where a trigger may happen: its option is given, if it has one, and not 0."""
        if trigger is Trigger.TOUCHED:
            return self.file is not None
        return not trigger.value.option or any(self.given[trigger])

    def check(self, *, keeps_tensors: bool, keeps_numbers: bool, spool_bytes: int) -> None:
        """Raise SettingError, with the setting's name, for steps that cannot be held or watched."""
        if self.last and keeps_tensors:
            raise SettingError(
                "steps: full tensors are not held back, they would fill the disk: leave "
                f"out --rs-tensors, or name steps instead of last:{self.last}"
            )
        if self.last and spool_bytes < LEAST_BLACK_BOX_BYTES:
            raise SettingError(
                f"steps: to hold last:{self.last} back a rank needs --rs-spool-bytes "
                f"{LEAST_BLACK_BOX_BYTES >> 20}M or more"
            )
        watched = self.given.get(Trigger.WATCHED)
        if watched and not keeps_numbers:
            raise SettingError(
                f"steps: watch:{watched[0]} looks at numbers, and --rs-digest none keeps none: "
                "leave one of them out"
            )

    @classmethod
    def parse(cls, text: str, *, is_known: bool = False) -> StepSelection:
        """Read `0-2,10`, `every:100`, `all`, `at:FILE`, or several of them separated by commas; or
        `last:N`, alone or with `at:FILE` and options of triggers. `is_known`: the run exists
        already, and the folder of its file may be gone. Raises SettingError for any other part, or
        a file that cannot be touched."""
        ranges: list[tuple[int, int]] = []
        periods: list[int] = []
        file: Path | None = None
        last = 0
        options_given: dict[Trigger, list[Any]] = {}
        parts = [part.strip() for part in text.split(",")]
        for number, part in enumerate(parts):
            word, colon, argument = part.partition(":")
            if part == "all":
                periods.append(1)
            elif colon and word == "every":
                periods.append(_count("every", argument, "every:100"))
            elif colon and word == "last":
                last = _count("last", argument, "last:20")
            elif colon and word in TRIGGER_WORDS:
                trigger = TRIGGER_WORDS[word]
                options_given.setdefault(trigger, []).append(trigger.value.parse(argument))
            elif colon and word == "at":
                if file is not None:
                    raise SettingError(f"{text!r} names two files: leave one at: out")
                file = Path(argument) if is_known else _file(argument)
                parts[number] = f"at:{file}"
            elif Trigger.WATCHED in options_given and not _RANGE.fullmatch(part):
                raise SettingError(
                    f"{part!r} is not a step: each value has a watch: of its own, like watch:{part}"
                )
            else:
                ranges.append(_range("a step", part, _HOW))
        if last and (ranges or periods):
            raise SettingError(
                f"{text!r} holds steps back and sends others: write last:N without them"
            )
        if options_given and not last:
            option = next(iter(options_given)).value.option
            raise SettingError(f"{text!r} has {option}, which only last:N waits for")
        options: dict[Trigger, tuple[Any, ...]] = {}
        for trigger in TRIGGER_WORDS.values() if last else ():
            facts = trigger.value
            default = [facts.parse(facts.default)] if facts.default else []
            options[trigger] = tuple(dict.fromkeys(options_given.get(trigger, default)))
        if last and options[Trigger.WATCHED] and not options[Trigger.SPIKE][-1]:
            raise SettingError(f"{text!r} watches a value and never looks: leave spike:0 out")
        return cls(",".join(parts), tuple(ranges), tuple(periods), file, last, options)


def rank_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Return the inclusive ranges of `0-3,8`. Raises SettingError for any other text."""
    remedy = "write ranks as 0-3,8 or all"
    return tuple(_range("a rank", part.strip(), remedy) for part in text.split(","))


def _range(noun: str, part: str, remedy: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(part)
    if not match:
        raise SettingError(f"{part!r} is not {noun}: {remedy}")
    if max(len(number or "") for number in match.groups()) > _MOST_DIGITS:
        raise SettingError(f"{part!r} is out of range: {remedy}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise SettingError(f"{part} ends before it begins: write {last}-{first}")
    return first, last


def _count(word: str, count: str, example: str) -> int:
    if not re.fullmatch("[0-9]+", count) or len(count) > _MOST_DIGITS or not int(count):
        raise SettingError(f"'{word}:{count}' wants a positive number of steps, like {example}")
    return int(count)


def _file(name: str) -> Path:
    if not name:
        raise SettingError("'at:' wants the file to be touched, like at:/shared/now")
    file = Path(name).expanduser().absolute()
    if os.path.isdir(file):
        raise SettingError(f"{file} is a folder; name a file in it: at:{file}/now")
    if not os.path.isdir(file.parent):
        raise SettingError(
            f"nobody could touch {file}, because {file.parent} is not a folder that "
            f"can be entered here; make it first"
        )
    return file
