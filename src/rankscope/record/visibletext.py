"""Names from models hold anything: what people are shown of them."""

from __future__ import annotations


def visible(text: str) -> str:
    """Return one line in which what does not print (names may hold anything) is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
