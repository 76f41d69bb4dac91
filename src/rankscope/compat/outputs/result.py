"""Putting what was recorded into what a forward returned, and turning that into a tuple."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

_LAST_STATES = ("vision_hidden_states", "last_hidden_state")


def last_state_of(outputs: Any) -> Any:
    """Return the last hidden state that a forward gives itself, None where it gives none."""
    for name in _LAST_STATES:
        value = value_in(outputs, name)
        if value is not None:
            return value
    return None


def value_in(outputs: Any, name: str) -> Any:
    """Return what a forward gives under a name, None where it gives nothing."""
    return outputs.get(name) if isinstance(outputs, dict) else getattr(outputs, name, None)


def with_recorded(outputs: Any, recorded: dict[str, tuple[Any, ...]], model: str) -> Any:
    """Return `outputs` (a mapping, a dataclass or a named tuple) with the recorded values under
    their names, the same object where it can be changed.

    Raises:
        TypeError: `outputs` has no place for a name.
    """
    if isinstance(outputs, (dict, MutableMapping)):
        for name, value in recorded.items():
            outputs[name] = value
        return outputs
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return _in_dataclass(outputs, recorded, model)
    fields = getattr(outputs, "_fields", ())
    if isinstance(outputs, tuple) and recorded.keys() <= set(fields):
        return outputs._replace(**recorded)  # type: ignore[attr-defined]
    raise _no_place(outputs, recorded, model)


def _in_dataclass(outputs: Any, recorded: dict[str, tuple[Any, ...]], model: str) -> Any:
    names = {field.name for field in dataclasses.fields(outputs)}
    if not recorded.keys() <= names:
        raise _no_place(outputs, recorded, model)
    if outputs.__dataclass_params__.frozen:
        return dataclasses.replace(outputs, **recorded)
    for name, value in recorded.items():
        setattr(outputs, name, value)
    return outputs


def _no_place(outputs: Any, recorded: Mapping[str, Any], model: str) -> TypeError:
    return TypeError(
        f"{model} was asked for {', '.join(recorded)}, and what its forward returned, "
        f"{type(outputs).__name__}, has no place for that. Return a mapping, or a dataclass or "
        "named tuple with a field of each of these names"
    )


def as_tuple(outputs: Any) -> Any:
    """Return the values of a mapping or dataclass that are not None, or its own `to_tuple()`;
    others come back as they are."""
    own = getattr(outputs, "to_tuple", None)
    if own is not None:
        return own()
    if isinstance(outputs, (dict, Mapping)):
        return tuple(value for value in outputs.values() if value is not None)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        values = [getattr(outputs, field.name) for field in dataclasses.fields(outputs)]
        return tuple(value for value in values if value is not None)
    return outputs
