"""What the commands share of the terminal: colours only on one, progress for anything that takes a
second, and the one way in which they print: what a file says can write text, and nothing else.

Names of modules, meshes, dtypes and flags, notes, errors and host names come out of files that
anybody may have written. A terminal obeys what is in them, a log viewer too. So every line passes
`shown`: what does not print is escaped, but for the colours that commands put in themselves.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from rankscope.record.texts import visible
from rankscope.run.messages import progress
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace

__all__ = [
    "LONGEST_NAME", "Paint", "cut", "echo", "echo_fitted", "echo_json", "fitted", "opened",
    "progress", "remark", "say_unread", "shortened", "shown", "size_text", "visible", "width",
]  # fmt: skip

_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_END_OF_STYLE: Final = "\x1b[0m"
_COLORS: Final = re.compile(f"(\x1b\\[(?:0|{'|'.join(_CODES.values())})m)")
"""What commands put around text, in a group of its own."""
LONGEST_NAME: Final = 40
"""Characters of a module, a slot or a list of ranks where a row has others beside it."""
_PART = re.compile(r"( {2,}|^)((?:\S| (?! ))+)")


class Paint:
    """Puts colours around text, or nothing where the stream is no terminal or NO_COLOR is set."""

    def __init__(self, stream: TextIO) -> None:
        self._is_on = _has_colors(stream)

    def __call__(self, style: str, text: str) -> str:
        """Return the text in a style of `_CODES`."""
        return f"\x1b[{_CODES[style]}m{text}{_END_OF_STYLE}" if self._is_on and text else text


def _has_colors(stream: TextIO) -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def shown(line: str, *, has_colors: bool = True) -> str:
    """Return one line as it may be printed; colours of `Paint` stay where it has any."""
    if line.isprintable():
        return line
    if not has_colors:
        return visible(line)
    parts = enumerate(_COLORS.split(line))
    return "".join(part if number % 2 else visible(part) for number, part in parts)


def echo(text: str, *, err: bool = False, is_line: bool = True, end: str = "\n") -> None:
    """Print a line, or with `is_line=False` text of several."""
    stream = sys.stderr if err else sys.stdout
    has_colors = _has_colors(stream)
    lines = [text] if is_line else text.split("\n")
    stream.write("\n".join(shown(line, has_colors=has_colors) for line in lines) + end)
    stream.flush()


def echo_json(
    command: str, status: str, result: Mapping[str, Any] | None, errors: Sequence[str] = ()
) -> None:
    """Print the one object of `--json`, the same for all commands (docs/commands.md)."""
    answer = {"command": command, "status": status, "result": result, "errors": [*errors]}
    echo(json.dumps({"format": "rankscope/1", **answer}))


def remark(line: str) -> None:
    """Say on stderr what goes with an answer."""
    echo(visible(f"rankscope: {line}"), err=True)


def size_text(count: float) -> str:
    """Return bytes as people read them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def width() -> int:
    """Return the columns of the terminal, or of COLUMNS; 0 where lines may be of any length."""
    return shutil.get_terminal_size((0, 0)).columns


def fitted(line: str, columns: int) -> Iterator[str]:
    """Yield a line in rows that fit: broken between its parts (two spaces), else between words."""
    if not columns or _length(line) <= columns:
        yield line
        return
    text = line.lstrip()
    indent = " " * (len(line) - len(text))
    row = indent
    for gap, part in _PART.findall(text):
        pieces = [(gap, part)]
        if _length(f"{indent}    {part}") > columns:
            pieces = [(gap if not n else " ", word) for n, word in enumerate(part.split(" "))]
        for between, piece in pieces:
            if row.strip() and _length(f"{row}{between}{piece}") > columns:
                yield row
                row = f"{indent}    {piece}"
            else:
                row = f"{row}{between}{piece}"
    yield row


def echo_fitted(lines: Iterable[str]) -> None:
    """Print lines in rows that fit the terminal."""
    columns = width()
    for line in lines:
        for row in fitted(line, columns):
            echo(row)


def cut(line: str, columns: int) -> str:
    """Return a line of at most so many columns: `...` stands for what is cut off its end, and no
    colour goes on behind it."""
    if _length(line) <= columns:
        return line
    room, parts, is_painted = max(columns - 3, 0), [], False
    for part in _COLORS.split(line):
        if _COLORS.fullmatch(part):
            is_painted = part != _END_OF_STYLE
            parts.append(part)
        else:
            begin = _begin(part, room)
            parts.append(begin)
            room -= _length(begin)
            if begin != part:
                break
    return "".join(parts) + "..."[:columns] + (_END_OF_STYLE if is_painted else "")


def shortened(text: str, longest: int = LONGEST_NAME) -> str:
    """Return text that prints, cut in its middle where it is longer."""
    text = visible(text)
    if len(text) <= longest:
        return text
    half = (longest - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def _begin(text: str, columns: int) -> str:
    """Return as much of the begin of a text without colours as takes at most so many columns."""
    if text.isascii():
        return text[:columns]
    widths = itertools.accumulate(map(_columns, text))
    return text[: sum(1 for width in widths if width <= columns)]


def _length(text: str) -> int:
    """Return the columns that a line takes on a terminal."""
    plain = _COLORS.sub("", text)
    return len(plain) if plain.isascii() else sum(map(_columns, plain))


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def opened(path: Path | None, *, takes_golden: bool = False) -> Trace:
    """Open a trace with progress shown, and say on stderr where it is not the finished tree."""
    with progress() as say:
        trace = open_trace(path, progress=say, takes_golden=takes_golden)
    if not trace.is_written:
        remark(f"{trace.path} holds no finished tree; this is what its ranks have sent so far")
    return trace


def say_unread(trace: Trace) -> None:
    """Say on stderr what of a trace was passed over because only a newer rankscope knows it; once
    all that a command needs has been read."""
    if trace.unread:
        remark(f"{trace.path}: {trace.unread}")
