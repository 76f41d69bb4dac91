"""Pytree nodes that libraries registered."""

from __future__ import annotations


def registered_children(
    value: object, libraries: frozenset[str]
) -> list[tuple[str, object]] | None:
    """Return the named children, by the registered flatten function, of an instance of a pytree
    node that one of these libraries registered, else None. Without torch's table nothing is
    registered."""
    from torch.utils import _pytree  # here: it imports optree machinery that most runs never need

    node = getattr(_pytree, "SUPPORTED_NODES", {}).get(type(value))
    if node is None or str(node.flatten_fn.__module__).partition(".")[0] not in libraries:
        return None
    with_keys = getattr(node, "flatten_with_keys_fn", None)
    if with_keys is not None:
        return [(_key_name(key), child) for key, child in with_keys(value)[0]]
    return [(str(index), child) for index, child in enumerate(node.flatten_fn(value)[0])]


def _key_name(key: object) -> str:
    for attribute in ("key", "name", "idx"):
        found = getattr(key, attribute, None)
        if isinstance(found, (str, int)):
            return str(found)
    return type(key).__name__
