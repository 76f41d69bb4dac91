"""`python -m tests.tree.columntable`: write what follows from the one list of columns into
docs/trace-format.md, its tables, and into the JSON schema of the package.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from rankscope.record.statistics import ADDED, STATISTICS
from rankscope.record.stepcolumns import COLUMNS, DIGEST, TABLES, Column
from rankscope.record.value import STORED_TYPES

__all__ = ["PAGE", "SCHEMA", "schema", "schema_text", "table_in", "tables"]

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "trace-format.md"
SCHEMA: Final = Path(str(resources.files("rankscope.tree"))) / "trace.schema.json"
_BEGIN: Final = "<!-- columns: python -m tests.tree.columntable -->\n"
_END: Final = "<!-- end of columns -->\n"
_LINE: Final = 121
_COUNT: Final = {"type": "integer", "minimum": 0}
_NUMBER: Final = {"$ref": "#/$defs/number"}
_STATISTIC: Final = {"$ref": "#/$defs/statistic"}
_NUMBERS: Final = {"type": "array", "items": _NUMBER}
_NOTHING: Final = {"type": "null"}
_IN_FILES: Final = ("texts", "utf8")
"""Tables that are no part of a step."""


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


def schema() -> dict[str, Any]:
    """Return the schema of the package as it has to be."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text())
    for name, properties in _parts().items():
        late = {each.name for each in ADDED}
        if name == "digest":
            late |= {column.own_name for column in DIGEST if column.since > 1}
        own = found["$defs"][name]
        own["properties"] = properties
        if {*own["required"]} != properties.keys() - late:
            own["required"] = sorted(properties.keys() - late)
    return found


def schema_text() -> str:
    """Return the same as it stands in the file."""
    return _text(schema()) + "\n"


def _row(column: Column) -> str:
    dtype = STORED_TYPES[np.dtype(column.dtype).name].name
    shape = f" [n, {column.width}]" if column.width > 1 else ""
    unit = f", {column.unit}" if column.unit else ""
    since = f" (from version {column.since} on)" if column.since > 1 else ""
    return f"| `{column.name}` | {dtype}{shape} | {column.meaning}{unit}{since} |"


def _parts() -> dict[str, dict[str, Any]]:
    """Return the fields of a digest, of a whole, of a summary (format 1), and of the rows of a
    step."""
    pair = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}
    span = {"oneOf": [_NOTHING, {**_NUMBERS, "minItems": 2, "maxItems": 2}]}
    wholes = {s.name: {**_COUNT, "type": ["integer", "null"]} for s in STATISTICS if s.is_count}
    return {
        "digest": {column.own_name: _schema_of(column) for column in DIGEST},
        "whole_digest": {
            **{s.name: wholes.get(s.name, _STATISTIC) for s in STATISTICS},
            "sketch": {"oneOf": [_NOTHING, _NUMBERS]},
        },
        "summary": {
            "distinct": _COUNT,
            "digested": _COUNT,
            **{s.name: _COUNT if s.is_count else span for s in STATISTICS if s.name != "count"},
        },
        "step_rows": {table: pair for table in TABLES if table not in _IN_FILES},
    }


def _schema_of(column: Column) -> dict[str, Any]:
    """Return what a number of a digest is in tree.json."""
    kind = np.dtype(column.dtype).kind
    if column.is_hex:
        return {"type": "string", "pattern": "^[0-9a-f]{16}$"}
    if kind == "f":
        return _NUMBERS if column.width > 1 else _STATISTIC
    return _COUNT if kind == "u" else {"type": "integer"}


def _text(data: Any, indent: int = 0, behind: int = 0) -> str:
    """Return JSON whose objects and lists stand on one line where there is room, `behind` a key."""
    flat = json.dumps(data, ensure_ascii=False)
    if indent + behind + len(flat) <= _LINE or not isinstance(data, (dict, list)):
        return flat
    pad = "\n" + " " * indent
    if isinstance(data, list):
        items = [_text(item, indent + 1) for item in data]
    else:
        keys = {key: f"{json.dumps(key)}: " for key in data}
        items = [keys[key] + _text(item, indent + 1, len(keys[key])) for key, item in data.items()]
    inside = ",".join(f"{pad} {item}" for item in items)
    return f"{'[' if isinstance(data, list) else '{'}{inside}{pad}{flat[-1]}"


if __name__ == "__main__":
    before, begin, rest = PAGE.read_text().partition(_BEGIN)
    _, end, behind = rest.partition(_END)
    assert begin and end, f"{PAGE} has no place for the tables"
    PAGE.write_text("".join([before, begin, tables(), end, behind]))
    SCHEMA.write_text(schema_text())
