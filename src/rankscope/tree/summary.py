"""A job in a few words, from the header of its trace: how big it was, how its ranks ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rankscope.record.ranks import EndReason, ranks_named

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
