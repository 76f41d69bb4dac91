"""The columns of a step: the one list from which numpy dtypes, checks, exports, the numbers in
tree.json, its schema and the page of the docs are made.

A step is rows of five tables. Rows that name a row of another table count within the step; texts
are those of the file.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rankscope.record.statistics import STATISTICS
from rankscope.record.value import SKETCH_SIZE

TABLES: Final[Mapping[str, str]] = {
    "nodes": "one row a call as all ranks made it, parents before what they called",
    "calls": "one row a node and rank, by node, then rank",
    "values": "one row a value and rank, by node, slot, layout and number, then rank",
    "samples": "one row a sample of a value whose batch dim is small",
    "failures": "one row a failure inside rankscope while it watched a call",
    "texts": "one row a text, of all steps of the file",
    "utf8": "the bytes of the texts",
}


_TEXT: Final = "number of a text"


class Told(enum.Enum):
    """Who says a column under its own name, beside step files."""

    NOWHERE = "readers make something else of it"
    EXPORTS = "Parquet and, of values, jsonl"
    DIGEST = "exports and tree.json: equal bytes have it in common, what is not digested has none"


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    """Table and column: `values.hash`."""
    dtype: str
    """As numpy writes it, little-endian."""
    meaning: str
    unit: str = ""
    since: int = 1
    """Version of step files that introduced it; older files read as `missing`."""
    missing: float | int = 0
    least: int = 0
    """Least valid number: -1 for a number of a text that a row may leave out."""
    width: int = 1
    """Numbers in a row."""
    told: Told = Told.NOWHERE
    none: int | None = None
    """The number that stands for a missing value: null in exports."""
    is_hex: bool = False
    """16 hex digits in JSON and exports."""

    @property
    def is_text(self) -> bool:
        """True for numbers of texts."""
        return self.meaning.startswith(_TEXT)

    @property
    def table(self) -> str:
        """Table that it is of."""
        return self.name.partition(".")[0]

    @property
    def own_name(self) -> str:
        """Its name within the table."""
        return self.name.partition(".")[2]


COLUMNS: Final[Mapping[str, Column]] = {
    column.name: column
    for column in (
        Column("nodes.id", "<u8", "the same call has the same id in every trace"),
        Column("nodes.parent", "<i8", "row of the node that called it, -1 for an outermost one"),
        Column("nodes.path", "<i4", f"{_TEXT}: canonical path of the module"),
        Column("nodes.phase", "<i4", f"{_TEXT}: part of the step, a word"),
        Column("nodes.micro_batch", "<i8", "n-th call of the root in the step, -1 for none"),
        Column("nodes.ordinal", "<i8", "n-th call of the path in phase and micro-batch, from 0"),
        Column("nodes.of_ordinal", "<i8", "of backward: the ordinal of its forward call"),
        Column("nodes.graph_task", "<i4", "of backward: which backward pass"),
        Column("calls.node", "<i8", "row of its node"),
        Column("calls.rank", "<i4", "global rank"),
        Column("calls.start_ns", "<i8", "wall clock at which it began", "ns", told=Told.EXPORTS),
        Column(
            "calls.duration_ns",
            "<i8",
            "how long it took, -1 where its end is not known",
            "ns",
            told=Told.EXPORTS,
            none=-1,
        ),
        Column("calls.status", "|u1", "how it ended, a number of CallStatus"),
        Column("calls.issued", "<u8", "torch's own count of collectives of the group, 0 for none"),
        Column("calls.module", "<i4", f"{_TEXT}: JSON of class, raw path and wrappers"),
        Column("calls.error", "<i4", f"{_TEXT}: what it raised, -1 for nothing", least=-1),
        Column(
            "calls.collective", "<i4", f"{_TEXT}: JSON of the collective, -1 for none", least=-1
        ),
        Column("calls.number", "<u4", "how many collectives of its channel came before"),
        Column("values.node", "<i8", "row of its node"),
        Column("values.slot", "<i4", f"{_TEXT}: name of the slot"),
        Column("values.tensor", "<i4", f"{_TEXT}: JSON of dtype, device, shapes and layout"),
        Column("values.rank", "<i4", "global rank"),
        Column("values.flags", "<u4", "bits of ValueFlag"),
        Column(
            "values.hash", "<u8", "of the bytes, order-sensitive", told=Told.DIGEST, is_hex=True
        ),
        *(
            Column(f"values.{s.name}", "<u8" if s.is_count else "<f8", s.meaning, told=Told.DIGEST)
            for s in STATISTICS
        ),
        Column("values.sketch", "<f8", "random projections", width=SKETCH_SIZE, told=Told.DIGEST),
        Column("values.time_ns", "<i8", "wall clock at which it was read", "ns", told=Told.EXPORTS),
        Column(
            "values.reference",
            "<u8",
            "of its full tensor in tensors/, 0 where none was kept",
            told=Told.EXPORTS,
            none=0,
        ),
        Column("values.digested", "|b1", "it has numbers", told=Told.EXPORTS),
        Column("values.chunk", "<u4", "number of the file in tensors/, 0 for none"),
        Column("values.sample_row", "<i8", "first row in samples, -1 for none"),
        Column("values.sample_count", "<i4", "samples"),
        Column("values.sample_dim", "<i4", "the batch dim"),
        Column("samples.sketch", "<f4", "random projections of the sample", width=SKETCH_SIZE),
        Column("failures.node", "<i8", "row of the node"),
        Column("failures.rank", "<i4", "global rank"),
        Column("failures.text", "<i4", f"{_TEXT}: what failed, -1 where not known", least=-1),
        Column("texts.end", "<i8", "where it ends in utf8; it begins where the one before ends"),
        Column("utf8.byte", "|u1", "UTF-8"),
    )
}
"""Columns in the order of a file."""

DIGEST: Final = tuple(
    sorted(
        (column for column in COLUMNS.values() if column.told is Told.DIGEST),
        key=lambda column: column.own_name not in {statistic.name for statistic in STATISTICS},
    )
)
"""Numbers of a value in tree.json and exports: statistics first."""


def exported_columns(table: str) -> tuple[Column, ...]:
    """Return the columns of a table that exports say under their own names."""
    exported = [c for c in COLUMNS.values() if c.table == table and c.told is Told.EXPORTS]
    return (*exported, *(column for column in DIGEST if column.table == table))
