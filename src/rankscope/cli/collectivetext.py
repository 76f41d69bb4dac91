"""What `rankscope show` says of a collective: `all_reduce(sum) over 0-1`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankscope.cli.terminal import visible
from rankscope.tree.ranks import ranks_named, ranks_text
from rankscope.tree.views import Node

__all__ = ["collective_lines", "collective_text"]

_PEERS = {"send": "to", "recv": "from"}


def collective_text(node: Node) -> str:
    """Return what the ranks of a node issued; "" where they differ, or it is no collective."""
    facts = node.data.get("collective")
    return "" if facts is None else _text(facts)


def collective_lines(node: Node) -> Iterator[str]:
    """Yield what each of the ranks issued, where they differ."""
    for facts in node.data.get("collectives", ()):
        yield f"{ranks_named(str(facts['ranks']))}  {_text(facts)}"


def _text(facts: Mapping[str, Any]) -> str:
    """Return the op with its reduction, the ranks it goes between, and whether it is waited for
    elsewhere. Parts are two spaces apart: lines are broken there.
    """
    op = str(facts.get("op", "collective"))
    if facts.get("reduce"):
        op += f"({facts['reduce']})"
    words = [op]
    peer = facts.get("peer")
    if peer is not None:
        who = "anybody" if peer == -1 else str(peer)
        words.append(f"{_PEERS.get(str(facts.get('op')), 'with')} {who}")
    words += [
        f"{word} {facts[name]}"
        for word, name in (("from", "src"), ("to", "dst"))
        if facts.get(name) is not None
    ]
    words.append(f"over {ranks_text(facts.get('members', ()))}")
    parts = [" ".join(words)]
    parts += [word for word, name in (("async", "async"), ("objects", "object")) if facts.get(name)]
    return "  ".join(visible(part) for part in parts)
