"""Which steps are traced: ranges, periods, all, or one whenever a file is touched. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import SettingError

__all__ = ["StepSelection", "number_ranges"]

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MOST_DIGITS = 9
"""Records number steps with 32 bits."""
_HOW = "write 0-2,10 or every:100 or all or at:FILE, or several of them with commas"


@dataclass(frozen=True, slots=True)
class StepSelection:
    """The setting `steps`; `agent.steps.touchedfile` is for what a file asks while the job runs."""

    text: str
    """As it would be written on a command line, its file with the whole path."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Inclusive on both ends."""
    periods: tuple[int, ...] = ()
    """Steps divisible by any of these."""
    file: Path | None = None
    """Each touch of it asks for one step."""

    def __contains__(self, step: int) -> bool:
        return any(step % period == 0 for period in self.periods) or any(
            first <= step <= last for first, last in self.ranges
        )

    def is_over(self, step: int) -> bool:
        """True where no step after `step` can ever be selected."""
        return not (self.periods or self.file) and all(last <= step for _, last in self.ranges)

    @classmethod
    def parse(cls, text: str) -> StepSelection:
        """Read `0-2,10`, `every:100`, `all`, `at:FILE`, or several of them separated by commas.

        Raises:
            SettingError: a part is none of these, or its file cannot be touched.
        """
        ranges: list[tuple[int, int]] = []
        periods: list[int] = []
        file: Path | None = None
        parts = [part.strip() for part in text.split(",")]
        for number, part in enumerate(parts):
            word, colon, rest = part.partition(":")
            if part == "all":
                periods.append(1)
            elif colon and word == "every":
                periods.append(_period(rest))
            elif colon and word == "at":
                if file is not None:
                    raise SettingError(f"{text!r} names two files: leave an at: away")
                file = _file(rest)
                parts[number] = f"at:{file}"
            else:
                ranges.append(_range("a step", part, _HOW))
        return cls(",".join(parts), tuple(ranges), tuple(periods), file)


def number_ranges(name: str, text: str) -> tuple[tuple[int, int], ...]:
    """Return the inclusive ranges of `0-3,8`.

    Raises:
        SettingError: the text is something else; names the setting.
    """
    how = f"write {name} as 0-3,8 or all"
    noun = f"a {name.removesuffix('s')}"
    return tuple(_range(noun, part.strip(), how) for part in text.split(","))


def _range(noun: str, part: str, how: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(part)
    if not found:
        raise SettingError(f"{part!r} is not {noun}: {how}")
    if max(len(number or "") for number in found.groups()) > _MOST_DIGITS:
        raise SettingError(f"{part!r} is out of range: {how}")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise SettingError(f"{part} ends before it begins: write {last}-{first}")
    return first, last


def _period(period: str) -> int:
    if not re.fullmatch("[0-9]+", period) or len(period) > _MOST_DIGITS or not int(period):
        raise SettingError(f"'every:{period}' wants a positive number of steps, like every:100")
    return int(period)


def _file(name: str) -> Path:
    if not name:
        raise SettingError("'at:' wants the file to be touched, like at:/shared/now")
    file = Path(name).expanduser().absolute()
    if os.path.isdir(file):
        raise SettingError(f"{file} is a folder; name a file in it: at:{file}/now")
    if not os.path.isdir(file.parent):
        raise SettingError(
            f"nobody could touch {file}, because {file.parent} is no folder that "
            f"can be entered here; make it first"
        )
    return file
