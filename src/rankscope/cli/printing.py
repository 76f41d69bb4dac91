"""The one way in which commands print: what a file says can write text, and nothing else.

Names of modules, meshes, dtypes and flags, notes, errors and host names come out of files that
anybody may have written. A terminal obeys what is in them, a log viewer too. So every line passes
`shown`: what does not print is escaped, but for the colours that commands put in themselves.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Final, TextIO

from rankscope.record.visibletext import visible

__all__ = ["COLORS", "PLAIN", "Paint", "echo", "shown"]

_CODES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
PLAIN: Final = "\x1b[0m"
"""Ends a style."""
COLORS: Final = re.compile(f"(\x1b\\[(?:0|{'|'.join(_CODES.values())})m)")
"""What commands put around text, in a group of its own."""


class Paint:
    """Puts colours around text, or nothing where the stream is no terminal or NO_COLOR is set."""

    def __init__(self, stream: TextIO) -> None:
        self._is_on = _has_colors(stream)

    def __call__(self, style: str, text: str) -> str:
        """Return the text in a style of `_CODES`."""
        return f"\x1b[{_CODES[style]}m{text}{PLAIN}" if self._is_on and text else text


def _has_colors(stream: TextIO) -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def shown(line: str, *, has_colors: bool = True) -> str:
    """Return one line as it may be printed; colours of `Paint` stay where it has any."""
    if line.isprintable():
        return line
    if not has_colors:
        return visible(line)
    return "".join(
        part if number % 2 else visible(part) for number, part in enumerate(COLORS.split(line))
    )


def echo(text: str, *, err: bool = False, is_line: bool = True, end: str = "\n") -> None:
    """Print a line, or with `is_line=False` text of several."""
    stream = sys.stderr if err else sys.stdout
    has_colors = _has_colors(stream)
    lines = [text] if is_line else text.split("\n")
    stream.write("\n".join(shown(each, has_colors=has_colors) for each in lines) + end)
    stream.flush()
