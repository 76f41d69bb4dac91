"""`python -m tests.tree.columntable`: write the tables of columns into docs/trace-format.md, made
from the one list of columns.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from rankscope.record.dtypes import STORED_TYPES
from rankscope.record.stepcolumns import COLUMNS, TABLES, Column
from tests.conftest import REPOSITORY

__all__ = ["PAGE", "table_in", "tables"]

PAGE: Final = REPOSITORY / "docs" / "trace-format.md"
_BEGIN: Final = "<!-- columns: python -m tests.tree.columntable -->\n"
_END: Final = "<!-- end of columns -->\n"


def tables() -> str:
    """Return a line and a table for each table of a step file."""
    lines: list[str] = []
    for table, meaning in TABLES.items():
        lines += [f"`{table}`: {meaning}.", "", "| column | type | meaning |", "|---|---|---|"]
        lines += [_row(column) for column in COLUMNS.values() if column.table == table]
        lines.append("")
    return "\n".join(lines)


def table_in(page: str) -> str:
    """Return what stands in a page in the place of the tables."""
    return page.partition(_BEGIN)[2].partition(_END)[0]


def _row(column: Column) -> str:
    dtype = STORED_TYPES[np.dtype(column.dtype).name].name
    shape = f" [n, {column.width}]" if column.width > 1 else ""
    unit = f", {column.unit}" if column.unit else ""
    since = f" (from version {column.since} on)" if column.since > 1 else ""
    return f"| `{column.name}` | {dtype}{shape} | {column.meaning}{unit}{since} |"


if __name__ == "__main__":
    before, begin, rest = PAGE.read_text().partition(_BEGIN)
    _, end, behind = rest.partition(_END)
    assert begin and end, f"{PAGE} has no place for the tables"
    PAGE.write_text("".join([before, begin, tables(), end, behind]))
