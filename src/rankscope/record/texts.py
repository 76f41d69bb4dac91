"""Texts for people: names made visible, times, versions of torch, command lines without the
passwords and tokens that a trace must not hold, and a job in a few words.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rankscope.record.ranks import EndReason, ranks_named


def visible(text: str) -> str:
    """Return one line in which what does not print (names may hold anything) is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def utc_text(wall_ns: int) -> str:
    """Return a wall-clock time, in nanoseconds, in ISO 8601, UTC, to the millisecond."""
    when = datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.timezone.utc)
    return when.isoformat(timespec="milliseconds")


OLDEST_TORCH: Final = "2.8"
_NEWEST_TESTED: Final = "2.15"


def is_older(version: str, reference: str) -> bool:
    """True where a version is of a minor release before another's; text without one is of none."""
    numbers = [re.match(r"(\d+)\.(\d+)", match) for match in (version, reference)]
    first, two = (tuple(map(int, match.groups())) if match else () for match in numbers)
    return bool(first and two) and first < two


def untested_warning(version: str) -> str:
    """Return a sentence on a torch that is newer than every one that was tested, else ""."""
    text = f"torch {version} is newer than {_NEWEST_TESTED}, the newest that was tested with this "
    text += "rankscope: nothing is known to be wrong with it, but nobody has looked"
    return text if is_older(_NEWEST_TESTED, version) else ""


_MASK = "***"
_OPTION = re.compile(r"-[-\w.]*")
_ASSIGNED = re.compile(r"([\w.-]+)([\"']?\s*[:=]\s*[\"']?)")
"""A name and the text between it and its value: `--token=`, `api_key: `, `"password": "`."""
_QUOTED_OR_WORD = re.compile(
    r"(?<=\")[^\"]+|(?<=')[^']+|(?:(?:bearer|basic)\s+)?[^\s\"'&,;}\]]*", re.IGNORECASE
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|apikey|accesskey|webhook|token$|(^|-)key$|signature$"
    r"|(^|-)(auth|authorization|bearer|cookie|jwt|pat|pwd|sig)(-|$)"
)
"""Matches a name in lower case with "-" between its parts; `--max-tokens` does not match."""
_SECRET_VALUE = re.compile(
    r"(?<=://)[^\s/'\"]*(?=@)"  # user and password of a URL
    r"|(?<=\bhooks\.slack\.com/services/)\S+|(?<=/api/webhooks/)\S+|(?<=/bot)\d+:[\w-]+"
    r"|(?<=\b[Bb]earer )\S+"
    r"|\b(AKIA|ASIA|AIza|eyJ|gh[oprsu]_|github_pat_|glpat-|hf_|npm_|pypi-|sk-|xox[a-z]-)[\w.-]{12,}"
)
"""Secrets known without a name: in URLs and headers, and tokens of well-known services."""


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with `***` for what looks like a secret."""
    masked = []
    is_named = False
    for word in words:
        is_value = is_named and not word.startswith("--")
        is_named = _OPTION.fullmatch(word) is not None and _is_secret(word)
        masked.append(_MASK if is_value else _without_secrets(word))
    return masked


def without_known_secrets(text: str) -> str:
    """Return a text with `***` in place of tokens and the user of a URL. Names are ignored, because
    sentences contain them: "unexpected token: int32"."""
    return _SECRET_VALUE.sub(_MASK, text)


def _without_secrets(text: str) -> str:
    pieces, at = [], 0
    for name in _ASSIGNED.finditer(text):
        if name.start() < at or not _is_secret(name[1]):
            continue
        value = _QUOTED_OR_WORD.match(text, name.end())
        is_whole = name.start() == 0 and "=" in name[2]  # one word is one value, blanks and all
        end = len(text) if is_whole or value is None else value.end()
        pieces += [text[at : name.end()], _MASK if end > name.end() else ""]
        at = end
    return without_known_secrets("".join([*pieces, text[at:]]))


def _is_secret(name: str) -> bool:
    parts = re.findall(r"[a-z0-9]+", _HUMP.sub(" ", name).lower())
    return _SECRET_NAME.search("-".join(parts)) is not None


# ---- a job in a few words ------------------------------------------------------------------------

NO_STEP: Final = "no step was traced"
_ENDED: Final = {
    EndReason.RAISED.value: "raised",
    EndReason.LOST.value: "lost",
    EndReason.SWITCHED_OFF.value: "switched off",
    EndReason.RUNNING.value: "still running",
}
"""Ends that are said beside the ranks; the others are in order."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 rank`, `2,000 ranks`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def extent(run: Mapping[str, Any]) -> str:
    """Return ranks, hosts, lives and meshes of the job, separated by commas."""
    lives = 1 + max((rank["incarnation"] for rank in run["ranks"]), default=0)
    parts = [
        f"{counted(run['world_size'], 'rank')} on {counted(len(run['hosts']), 'host')}",
        *([f"{lives} lives"] if lives > 1 else []),
        *(["; ".join(f"mesh {mesh['name']}" for mesh in run["meshes"])] if run["meshes"] else []),
    ]
    return ", ".join(parts)


def said_by_ranks(rank_texts: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Yield `ranks 0-3: text` of pairs of a rank and a text, each text once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in rank_texts:
        ranks_of.setdefault(text, []).append(rank)
    yield from (f"{ranks_named(ranks)}: {text}" for text, ranks in ranks_of.items())


def ended_words(run: Mapping[str, Any]) -> str:
    """Return how a job was ended from outside, "" where it was not."""
    ended = run.get("ended", {})
    if ended.get("how") == "interrupted":
        return f"interrupted by {ended.get('by', 'a signal')}"
    return "all ranks were killed between two steps" if ended else ""


def endings(completeness: Mapping[str, Any]) -> list[str]:
    """Return which ranks did not end in order, in their last life: `ranks 0-1 raised`."""
    last = {rank["rank"]: rank["end"] for rank in completeness["ranks"]}
    parts = []
    for end, word in _ENDED.items():
        if ranks := [rank for rank, reason in last.items() if reason == end]:
            parts.append(f"{ranks_named(ranks)} {word}")
    missing = completeness["missing"]
    return [*parts, f"nothing from {ranks_named(missing)}"] if missing else parts
