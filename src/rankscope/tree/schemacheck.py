"""The JSON of a trace held to its own schema as it is read, so that no later code has to.

`trace.schema.json` is compiled once into nested functions. They ask for the types, the fields and
the bounds that the schema names, and pass over what a newer rankscope of the same format may add:
further fields, and words that are not in a list. All that is false there is then a TraceError that
names the place.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rankscope.errors import TraceError

__all__ = ["check_json"]

Rule = Callable[[Any], bool]
Schema = Mapping[str, Any]

_PLACE: Final = Path(__file__).with_name("trace.schema.json")
_LARGEST: Final = 1 << 63
_NUMBER_WORDS: Final = frozenset({"nan", "inf", "-inf"})
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SHOWN: Final = 60


def check_json(data: Any, definition: str, file: Path) -> None:
    """Hold JSON data to one definition of the schema.

    Args:
        data: what was decoded.
        definition: its name under `$defs`.
        file: where it was read.

    Raises:
        TraceError: it is something else; says where.
    """
    try:
        if _rule(definition)(data):
            return
        place = _wrong_place(data, {"$ref": f"#/$defs/{definition}"}, "")
    except RecursionError:
        place = "it is nested too deep"
    raise TraceError(f"{file}: {place}: the trace is damaged")


@functools.cache
def _definitions() -> Mapping[str, Schema]:
    found: Mapping[str, Schema] = json.loads(_PLACE.read_bytes())["$defs"]
    return found


@functools.cache
def _rule(definition: str) -> Rule:
    return _compiled(_definitions()[definition])


def _resolved(schema: Schema) -> Schema:
    while "$ref" in schema:
        schema = _definitions()[schema["$ref"].rpartition("/")[2]]
    return schema


def _plain_types(schema: Schema) -> frozenset[type] | None:
    """Return the types of a schema that asks for nothing else, None where it does."""
    schema = _resolved(schema)
    if "enum" in schema:
        return None if set(schema["enum"]) <= _NUMBER_WORDS else frozenset({str})
    if "const" in schema:
        return frozenset({type(schema["const"])})
    if "oneOf" in schema and "type" not in schema:
        found = [_plain_types(each) for each in schema["oneOf"]]
        return frozenset().union(*(one or () for one in found)) if all(found) else None
    listed = schema.get("type", ())
    names = [listed] if type(listed) is str else listed
    if not names or not {*schema} <= {"type", "description"} or {"object", "array"} & {*names}:
        return None
    if "integer" in names:
        return None
    return frozenset(kind for name in names for kind in _TYPES[name])


def _compiled(schema: Schema) -> Rule:
    """Return what says whether a value keeps to a schema."""
    plain = _plain_types(schema)
    if plain is not None:
        return lambda value: type(value) in plain
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        made: list[Rule] = []

        def by_name(value: Any) -> bool:
            if not made:  # a node holds nodes: it is compiled when it is first met
                made.append(_rule(name))
            return made[0](value)

        return by_name
    if "oneOf" in schema and "type" not in schema:
        return _one_of(schema["oneOf"])
    if "enum" in schema:
        return lambda value: type(value) is str and value in _NUMBER_WORDS
    listed = schema["type"]
    kinds = tuple(_typed(each, schema) for each in ([listed] if type(listed) is str else listed))
    if len(kinds) == 1:
        return kinds[0]
    return lambda value: any(kind(value) for kind in kinds)


def _one_of(choices: Sequence[Schema]) -> Rule:
    """Return the rule of several schemas; what is a matter of types alone is asked first."""
    types: frozenset[type] = frozenset().union(*(_plain_types(each) or () for each in choices))
    rules = [_compiled(each) for each in choices if _plain_types(each) is None]
    return lambda value: type(value) in types or any(rule(value) for rule in rules)


def _typed(name: str, schema: Schema) -> Rule:
    match name:
        case "object":
            return _object(schema)
        case "array":
            return _array(schema)
        case "string" if "pattern" in schema:
            fits = functools.lru_cache(re.compile(schema["pattern"], re.ASCII).fullmatch)
            return lambda value: type(value) is str and fits(value) is not None
        case "integer":
            low, high = schema.get("minimum", -_LARGEST), schema.get("maximum", 2 * _LARGEST - 1)
            return lambda value: type(value) is int and low <= value <= high
        case _:
            types = _TYPES[name]
            return lambda value: type(value) in types


def _object(schema: Schema) -> Rule:
    properties: Mapping[str, Schema] = schema.get("properties", {})
    plain = {name: types for name, each in properties.items() if (types := _plain_types(each))}
    rules = {name: _compiled(each) for name, each in properties.items() if name not in plain}
    needed = frozenset(schema.get("required", ()))
    others = schema.get("additionalProperties")
    other = _compiled(others) if isinstance(others, dict) else None
    choices = [frozenset(each["required"]) for each in schema.get("oneOf", ())]

    def is_object(value: Any) -> bool:
        if type(value) is not dict or not needed <= value.keys():
            return False
        for name, item in value.items():
            types = plain.get(name)
            if types is not None:
                if type(item) not in types:
                    return False
            else:
                rule = rules.get(name, other)
                if rule is not None and not rule(item):
                    return False
        return not choices or any(choice <= value.keys() for choice in choices)

    return is_object


def _array(schema: Schema) -> Rule:
    types = _plain_types(schema["items"])
    item = _compiled(schema["items"])
    is_number = types is None and _resolved(schema["items"]) == _definitions()["number"]
    least, most = schema.get("minItems", 0), schema.get("maxItems", _LARGEST)

    def is_array(value: Any) -> bool:
        if type(value) is not list or not least <= len(value) <= most:
            return False
        if types is not None:
            return {*map(type, value)} <= types
        if is_number and {*map(type, value)} <= {float}:
            return True
        return all(map(item, value))

    return is_array


# ---- what is wrong, once it is known that something is ------------------------------------------


def _wrong_place(value: Any, schema: Schema, place: str) -> str:
    """Return where a value first leaves a schema, and what stands there."""
    schema = _resolved(schema)
    if isinstance(value, dict):
        missing = [name for name in schema.get("required", ()) if name not in value]
        if missing:
            return f"{place or '/'} has no {missing[0]}"
        properties, other = schema.get("properties", {}), schema.get("additionalProperties")
        for name, item in value.items():
            own = properties.get(name, other)
            if isinstance(own, dict) and not _compiled(own)(item):
                return _wrong_place(item, own, f"{place}/{name[:_SHOWN]}")
    if isinstance(value, list) and "items" in schema:
        rule = _compiled(schema["items"])
        for number, item in enumerate(value):
            if not rule(item):
                return _wrong_place(item, schema["items"], f"{place}/{number}")
    if isinstance(value, (dict, list)):
        text = f"a {type(value).__name__} of {len(value)}"
    else:
        text = repr(value if not isinstance(value, str) else value[:_SHOWN])
    return f"{place or '/'} is {text[: 2 * _SHOWN]}"
