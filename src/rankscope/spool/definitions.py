"""Definitions: what a DEFINITION record says, checked against the fields of its kind.

A record whose cells are valid may still hold anything (damaged memory, another program). Here is
the one place where its bytes become a map and every field gets the type and the bounds that all
later code counts on. A definition that does not keep to them is refused with a reason, and the
caller sets it aside. Left out: fields that no reader knows, and all fields of a kind that only a
newer rankscope writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]  # ships no annotations

from rankscope.errors import SpoolError
from rankscope.record.ranks import MAX_INCARNATIONS, MAX_RANKS
from rankscope.spool.recordformat import DEFINITION_LENGTH, FORMAT_VERSION, LATEST_NS

Decoded = dict[bytes, "dict[str, Any] | str"]
"""Definitions by their bytes; for a refused definition the reason."""

_NUMBERS: Final = 1 << 32
_INTEGERS: Final = 1 << 63
_MOST_DIMS: Final = 64
"""Most dims of a tensor or a mesh; torch has no more."""
_SHOWN: Final = 60

Check = Callable[[Any], bool]


def _of_type(kind: type) -> Check:
    # the exact type: True is an int to `isinstance`, and no count
    return lambda value: type(value) is kind


def _within(low: int, end: int) -> Check:
    return lambda value: type(value) is int and low <= value < end


_text = _of_type(str)
_flag = _of_type(bool)
_number = _within(0, _NUMBERS)
_integer = _within(-_INTEGERS, _INTEGERS)
_size = _within(0, _INTEGERS)
_rank = _within(0, MAX_RANKS)
_time = _within(0, LATEST_NS)


def _list(check: Check, limit: int | None = None) -> Check:
    return lambda value: (
        type(value) is list and (limit is None or len(value) <= limit) and all(map(check, value))
    )


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _run_of_steps(value: Any) -> bool:
    return type(value) is list and len(value) == 3 and value[0] in (0, 1) and _pair(value[1:])


def _by_name(*kinds: type) -> Check:
    return lambda value: (
        type(value) is dict and all(type(k) is str and type(v) in kinds for k, v in value.items())
    )


def _distinct_ranks(value: Any) -> bool:
    return type(value) is list and all(map(_rank, value)) and len(set(value)) == len(value)


def _pair(value: Any) -> bool:
    return (
        type(value) is list and len(value) == 2 and all(map(_size, value)) and value[0] <= value[1]
    )


_shape = _list(_size, _MOST_DIMS)
_texts = _list(_text)
_texts_by_name = _by_name(str)
_fact = _by_name(str, int, bool, float, type(None))
"""Fields of any note; a note of a newer rankscope stays a text."""

_FIELDS: Final[Mapping[str, Mapping[str, Check]]] = {
    "rank": {
        "rank": _rank, "world_size?": _within(1, MAX_RANKS + 1), "local_rank?": _rank,
        "local_world_size?": _within(0, MAX_RANKS + 1),
        "incarnation?": _within(0, MAX_INCARNATIONS), "host?": _text, "pid?": _size,
        "format?": _number, "run_id?": _text, "wall_ns?": _time, "monotonic_ns?": _time,
        "versions?": _texts_by_name, "argv?": _texts, "settings?": _texts_by_name,
        "environment?": _texts_by_name,
    },
    "root": {"class": _text, "parameters": _size, "preferred?": _flag},
    "inside": {"root": _number, "in": _number, "path": _text},
    "module": {
        "root": _number, "path": _text, "raw_path?": _text, "class": _text, "wrappers?": _texts,
        "opaque?": _flag,
    },
    "mark": {
        "module": _number, "name": _text, "axis": _text, "placement": _text,
        "members?": _or_none(_distinct_ranks), "activation?": _flag,
    },
    "slot": {"name": _text},
    "meta": {
        "dtype": _text, "device?": _text, "shape": _shape, "global_shape?": _or_none(_shape),
        "source?": _text, "mesh?": _number, "placements?": _texts,
        "ranges?": _or_none(_list(_list(_pair), _MOST_DIMS)), "note?": _or_none(_text),
        "requires_grad?": _flag,
    },
    "mesh": {
        "axes": _texts, "shape": _list(_within(1, MAX_RANKS + 1), _MOST_DIMS),
        "ranks": _distinct_ranks, "device?": _text,
    },
    "text": {"text": _text, "fact?": _fact},
    "group": {
        "name": _text, "ranks": _distinct_ranks, "backend?": _text, "description?": _or_none(_text),
    },
    "collective": {
        "op": _text, "group": _text, "members": _distinct_ranks, "async": _flag, "issuer": _text,
        "reduce?": _or_none(_text), "src?": _or_none(_integer), "dst?": _or_none(_integer),
        "peer?": _or_none(_integer), "tag?": _or_none(_integer), "object?": _flag, "since?": _text,
        "at?": _text,
    },
    "layout": {"file?": _text, "text?": _text},
    "raised": {"error?": _text, "causes?": _texts, "where?": _text},
    "not_kept": {"reason?": _text, "text?": _text},
    "asked": {
        "event": _text, "mode": lambda value: value in ("train", "eval"), "first": _size,
        "last": _size, "text": _text,
    },
    "untold": {"entry": _text},
    "copied": {
        "kept?": _size, "ring?": _integer, "high?": _size, "step": _integer,
        "copied": _list(_run_of_steps), "gone": _list(_run_of_steps),
        "torn": _list(_run_of_steps), "hole?": _integer, "mode?": _within(0, 2),
        "dropping?": _list(_size, 2),
        "calls?": _list(_pair), "windows?": _number, "noted?": _number, "numbers?": _number,
        "is_done": _flag, "is_taken?": _flag,
    },
}  # fmt: skip
"""Type of each field of a kind; lists of ranks are in the order of their group. Fields without a
question mark are required; spools of an older rankscope lack some of the others."""
_KINDS: Final = {
    kind: ({name.rstrip("?"): check for name, check in fields.items()},
           {name for name in fields if not name.endswith("?")})
    for kind, fields in _FIELDS.items()
}  # fmt: skip


def decode_definition(payload: bytes) -> dict[str, Any]:
    """Return the definition in the payload of a DEFINITION record. Raises SpoolError for anything
    else, or a field of another type than its kind requires."""
    start = DEFINITION_LENGTH.size
    (length,) = DEFINITION_LENGTH.unpack_from(payload)
    if not 0 < length <= len(payload) - start:
        raise SpoolError("its length is not that of its record")
    fields_here = unpack_map(payload[start : start + length])
    number, kind = fields_here.get("id"), fields_here.get("kind")
    if type(number) is not int or not 0 < number < _NUMBERS:
        raise SpoolError(f"its id is {_shown(number)}")
    if type(kind) is not str:
        raise SpoolError(f"its kind is {_shown(kind)}")
    version = fields_here.get("format")
    if kind == "rank" and type(version) is int and FORMAT_VERSION < version < _NUMBERS:
        return {"id": number, "kind": kind, "format": version}  # its reader refuses that version
    # of a newer rankscope: passed over by its number, its fields are nobody's business here
    if kind not in _KINDS:
        return {"id": number, "kind": kind}
    fields, needed = _KINDS[kind]
    definition: dict[str, Any] = {"id": number, "kind": kind}
    for name, check in fields.items():
        if name in fields_here:
            value = definition[name] = fields_here[name]
            if not check(value):
                raise SpoolError(f"{name} of a {kind} is {_shown(value)}")
    missing = needed - definition.keys()
    if missing:
        raise SpoolError(f"a {kind} has no {', '.join(sorted(missing))}")
    if kind == "rank" and definition["rank"] >= definition.get("world_size", MAX_RANKS):
        raise SpoolError(f"rank {definition['rank']} in a world of {definition['world_size']}")
    if kind == "mesh":
        axes, shape, ranks = definition["axes"], definition["shape"], definition["ranks"]
        if len(axes) != len(shape) or math.prod(shape) != len(ranks):
            raise SpoolError(f"a mesh of {len(axes)} axes has {len(ranks)} ranks")
    return definition


def _shown(value: Any) -> str:
    """Return a few words of a value, however large it is."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value[:_SHOWN] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def unpack_map(packed: bytes) -> dict[str, Any]:
    """Decode one msgpack map: text keys, no extension types. Raises SpoolError for others."""
    size = len(packed)
    # nothing in it can be longer than the bytes: msgpack would reserve what a damaged length asks
    # for
    lengths = dict.fromkeys(("str", "bin", "array", "map"), size) | {"ext": 0}
    limits = {f"max_{kind}_len": limit for kind, limit in lengths.items()}
    try:
        decoded = msgpack.unpackb(packed, raw=False, strict_map_key=True, use_list=True, **limits)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        raise SpoolError(f"{size} bytes are not a msgpack map: {error}") from error
    if not isinstance(decoded, dict) or not all(isinstance(key, str) for key in decoded):
        raise SpoolError(f"expected a msgpack map with text keys, found {type(decoded).__name__}")
    return decoded
