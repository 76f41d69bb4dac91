"""Reading what may be damaged: one kind of error, and JSON held to the schema of a trace.

Columns and JSON are read when they are asked for, so a wrong field shows long after the file was
opened. It then is a TraceError that names file and place. `trace.schema.json` is compiled once into
nested functions; they pass over what a newer rankscope of the same format may add: further fields,
and words that are not in a list.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import rankscope
from rankscope.errors import TraceError, TraceVersionError

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What reading columns or JSON of another shape than expected raises."""
T = TypeVar("T")


def damage(file: object, error: Exception, where: str = "") -> TraceError:
    """Return the error for one of `UNREADABLE`; `where`: place in the file, after a space."""
    return TraceError(f"{file}: {type(error).__name__} {error}{where}: the trace is damaged")


def damaged_is_trace_error(view: type[T]) -> type[T]:
    """Make properties and methods raise TraceError on damaged data; needs `_where.file`."""
    for name, item in [*vars(view).items()]:
        if isinstance(item, property) and item.fget is not None:
            setattr(view, name, property(_guarded(item.fget), doc=item.__doc__))
        elif inspect.isfunction(item) and not name.startswith("_"):
            setattr(view, name, _guarded(item))
    return view


def _guarded(read: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(read):
        return read  # reads through the others

    @functools.wraps(read)
    def guarded(view: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return read(view, *args, **kwargs)
        except UNREADABLE as error:
            where = f" in {read.__name__} of a {type(view).__name__}"
            raise damage(view._where.file, error, where) from error

    return guarded


_FORMAT = re.compile(r"rankscope\.(trace|nodes)/([0-9]{1,9})")
_NEWEST = {"trace": 3, "nodes": 1}


def load_json(path: Path, kind: str) -> dict[str, Any]:
    """Read a file of a trace; `kind`: trace or nodes. TraceError: it cannot be read, or is of
    another kind; TraceVersionError: it is of a newer format."""
    try:
        data = json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is not JSON ({error}); the trace is damaged") from error
    format_match = _FORMAT.fullmatch(str(data.get("format"))) if isinstance(data, dict) else None
    if format_match is None or format_match[1] != kind:
        raise TraceError(
            f"{path}: no rankscope {kind}, or a damaged one: it names no rankscope.{kind} format"
        )
    if int(format_match[2]) > _NEWEST[kind]:
        run = data.get("run")
        versions = run.get("versions") if isinstance(run, dict) else None
        maker = versions.get("rankscope") if isinstance(versions, dict) else None
        needed = f"rankscope {maker} or newer" if maker else "a newer rankscope"
        if maker == rankscope.__version__:  # between two releases
            needed = f"the rankscope {maker} that wrote it, a newer build than this one"
        raise TraceVersionError(
            f"{path}: format {format_match[0]}, this rankscope reads up to "
            f"rankscope.{kind}/{_NEWEST[kind]}; install {needed}"
        )
    is_older = kind == "trace" and int(format_match[2]) < _NEWEST[kind]
    check_json(data, f"older_{kind}" if is_older else kind, path)
    checked: dict[str, Any] = data
    return checked


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


Wrong = tuple[str, str]
"""Path of keys inside a value, "" for the value itself, and what leaves the schema there."""
Rule = Callable[[Any], Wrong | None]
"""Returns None for a value that keeps to a schema."""
Schema = Mapping[str, Any]

_PLACE: Final = Path(__file__).with_name("trace.schema.json")
_LARGEST: Final = 1 << 63
_NUMBER_WORDS: Final = frozenset({"nan", "inf", "-inf"})
_TYPES: Final[Mapping[str, frozenset[type]]] = {
    "string": frozenset({str}),
    "number": frozenset({int, float}),
    "boolean": frozenset({bool}),
    "null": frozenset({type(None)}),
}
_SHOWN: Final = 60


def check_json(data: Any, definition: str, file: Path) -> None:
    """Hold JSON data to a definition under the schema's `$defs`; TraceError: it leaves it."""
    try:
        wrong = _rule(definition)(data)
    except RecursionError:
        raise TraceError(f"{file}: it is nested too deep: the trace is damaged") from None
    if wrong is not None:
        raise TraceError(f"{file}: {wrong[0] or '/'} {wrong[1]}: the trace is damaged")


@functools.cache
def _definitions() -> Mapping[str, Schema]:
    definitions: Mapping[str, Schema] = json.loads(_PLACE.read_bytes())["$defs"]
    return definitions


@functools.cache
def _rule(definition: str) -> Rule:
    return _compiled(_definitions()[definition])


def _compiled(schema: Schema) -> Rule:
    """Return what says how a value leaves a schema."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return lambda value: _rule(name)(value)  # a node holds nodes: compiled when it is first met
    if "enum" in schema:
        if _NUMBER_WORDS.issuperset(schema["enum"]):
            return _where(lambda value: type(value) is str and value in _NUMBER_WORDS)
        return _of_types(_TYPES["string"])
    if "const" in schema:
        return _of_types(frozenset({type(schema["const"])}))
    if "type" not in schema:
        return _any_of([_compiled(choice) for choice in schema["oneOf"]])
    kinds = schema["type"]
    return _typed(kinds, schema) if isinstance(kinds, str) else _any_of(
        [_typed(kind, schema) for kind in kinds]
    )  # fmt: skip


def _typed(kind: str, schema: Schema) -> Rule:
    match kind:
        case "object":
            return _object(schema)
        case "array":
            return _array(schema)
        case "string" if "pattern" in schema:
            fits = functools.lru_cache(re.compile(schema["pattern"], re.ASCII).fullmatch)
            return _where(lambda value: type(value) is str and fits(value) is not None)
        case "integer":
            low, high = schema.get("minimum", -_LARGEST), schema.get("maximum", 2 * _LARGEST - 1)
            return _where(lambda value: type(value) is int and low <= value <= high)
        case _:
            return _of_types(_TYPES[kind])


def _of_types(types: frozenset[type]) -> Rule:
    return lambda value: None if type(value) in types else _other(value)


def _where(holds: Callable[[Any], bool]) -> Rule:
    return lambda value: None if holds(value) else _other(value)


def _any_of(rules: list[Rule]) -> Rule:
    def is_one(value: Any) -> Wrong | None:
        return None if any(rule(value) is None for rule in rules) else _other(value)

    return is_one


def _object(schema: Schema) -> Rule:
    rules = {name: _compiled(part) for name, part in schema.get("properties", {}).items()}
    needed = schema.get("required", ())
    extra = schema.get("additionalProperties")
    extra_rule = _compiled(extra) if isinstance(extra, dict) else None
    choices = [frozenset(part["required"]) for part in schema.get("oneOf", ())]

    def is_object(value: Any) -> Wrong | None:
        if type(value) is not dict:
            return _other(value)
        for name in needed:
            if name not in value:
                return "", f"has no {name}"
        for name, item in value.items():
            rule = rules.get(name, extra_rule)
            wrong = None if rule is None else rule(item)
            if wrong is not None:
                return f"/{name[:_SHOWN]}{wrong[0]}", wrong[1]
        if choices and not any(choice <= value.keys() for choice in choices):
            return _other(value)
        return None

    return is_object


def _array(schema: Schema) -> Rule:
    rule = _compiled(schema["items"])
    least, limit = schema.get("minItems", 0), schema.get("maxItems", _LARGEST)

    def is_array(value: Any) -> Wrong | None:
        if type(value) is not list:
            return _other(value)
        for number, item in enumerate(value):
            if (wrong := rule(item)) is not None:
                return f"/{number}{wrong[0]}", wrong[1]
        return None if least <= len(value) <= limit else _other(value)

    return is_array


def _other(value: Any) -> Wrong:
    if isinstance(value, (dict, list)):
        return "", f"is a {type(value).__name__} of {len(value)}"
    text = repr(value if not isinstance(value, str) else value[:_SHOWN])
    return "", f"is {text[: 2 * _SHOWN]}"
