"""A trace's numbers as records: from the JSON of a slot, and from the value columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.record.notes import Note
from rankscope.record.ranklists import parse_ranks
from rankscope.record.statistics import (
    ADDED,
    COUNTS,
    MEASURED,
    NUMBERS,
    STATISTICS,
    OverShards,
)
from rankscope.record.value import Digest
from rankscope.record.wholestatistics import Combined
from rankscope.tree.jsontext import read_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Columns", "Fold", "column_digest", "read_combined", "read_fold"]

Columns = Mapping[str, "NDArray[Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One value, and the ranks that hold it."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    """Local shape."""
    digest: Digest | None
    """None where it was not digested, or where the numbers stand in the columns alone."""
    flags: tuple[str, ...]
    note: str | None
    requires_grad: bool


def read_fold(data: Mapping[str, Any], world_size: int) -> Fold:
    """Return one entry of a slot's "values", of a trace of so many ranks."""
    digest = data.get("digest")
    return Fold(
        ranks=parse_ranks(data["ranks"], world_size),
        shape=tuple(data["shape"]),
        digest=None if digest is None else _digest(digest),
        flags=tuple(data.get("flags", ())),
        note=data.get("note"),
        requires_grad=bool(data.get("requires_grad", False)),
    )


def _digest(data: Mapping[str, Any]) -> Digest:
    numbers: dict[str, Any] = {name: int(data[name]) for name in COUNTS}
    numbers |= {each.name: read_number(data[each.name]) for each in MEASURED if not each.is_count}
    numbers |= {each.name: read_number(data.get(each.name)) for each in ADDED}
    sketch = tuple(read_number(s) for s in data["sketch"])
    return Digest.of(numbers, int(data["hash"], 16), sketch)


def column_digest(columns: Columns, row: int) -> Digest:
    """Return the numbers in one row of the value columns."""
    numbers: dict[str, Any] = {name: int(columns[f"values.{name}"][row]) for name in COUNTS}
    numbers |= {name: float(columns[f"values.{name}"][row]) for name in NUMBERS}
    sketch = tuple(columns["values.sketch"][row].tolist())
    return Digest.of(numbers, int(columns["values.hash"][row]), sketch)


def read_combined(data: Mapping[str, Any], world_size: int) -> Combined:
    """Return one entry of a slot's "combined", of a trace of so many ranks."""
    ranks, digest = parse_ranks(data["ranks"], world_size), data.get("digest")
    note = Note.read(data["note"], data.get("fact")) if "note" in data else None
    if digest is None:
        return Combined(ranks=ranks, note=note)
    # null beside known counts is an undefined statistic (NaN); beside unknown ones it is unknown
    is_whole = digest["nan"] is not None
    numbers: dict[str, Any] = {name: digest[name] for name in COUNTS}
    for each in STATISTICS:
        if not each.is_count:
            value = digest.get(each.name) if each in ADDED else digest[each.name]
            is_defined = is_whole and each.over_shards is not OverShards.UNKNOWN
            known = value is not None or is_defined
            numbers[each.name] = read_number(value) if known else None
    found = digest["sketch"]
    sketch = None if found is None else tuple(read_number(s) for s in found)
    return Combined.of(numbers, ranks=ranks, note=note, sketch=sketch)
