"""What a call of a captured forward asks for: the `output_*` flags, and the index selection.

A flag is looked for among the keywords, then among the positional arguments, then in the model's
config; None means that this place does not say.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# `output_attentions` asks for these too, where they have no flag of their own
WITH_ATTENTIONS = ("cross_attentions", "mask_decoder_attentions")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Parameters:
    """What a decorated forward takes, read once when it is decorated."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.takes_any_keyword = True
        self._names: frozenset[str] = frozenset()
        self.positions: dict[str, int] = {}
        """Position of every argument that may be given by position; the model is not counted."""
        try:
            outermost = inspect.signature(func, follow_wrapped=False).parameters.values()
            innermost = inspect.signature(func).parameters.values()
        except (TypeError, ValueError):
            return  # a callable that does not say what it takes gets what is given
        self.takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in outermost)
        self._names = frozenset(p.name for p in outermost)
        self.positions = {
            parameter.name: position - 1
            for position, parameter in enumerate(innermost)
            if parameter.kind in _POSITIONAL
        }

    def take(self, name: str) -> bool:
        """True where the forward can be given this keyword."""
        return self.takes_any_keyword or name in self._names

    def drop_unknown(self, declared: Iterable[str], kwargs: dict[str, Any]) -> None:
        """Take the flags of these outputs out of a call whose forward knows nothing of them."""
        for key in declared:
            name = f"output_{key}"
            if name in kwargs and not self.take(name):
                del kwargs[name]

    def given(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument of that name, None where the call does not give it."""
        value = kwargs.get(name)
        position = self.positions.get(name)
        if value is None and position is not None and position < len(args):
            return args[position]
        return value

    def with_argument(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return the positional arguments of a call that gives `value` as `name`; as a keyword
        where the position is not reached, and not at all where the forward cannot take it."""
        position = self.positions.get(name)
        if position is not None and position < len(args):
            return (*args[:position], value, *args[position + 1 :])
        if self.take(name):
            kwargs[name] = value
        return args


def config_value(config: Any, name: str) -> Any:
    """Return one value of a config (an object, a dict or None), None where it is not there."""
    if isinstance(config, dict):
        return config.get(name)
    return getattr(config, name, None)


def requested(
    config: Any,
    declared: Iterable[str],
    parameters: Parameters,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the declared outputs that a call asks for, in order, with the flag that asks for
    each."""
    found = {}
    for key in declared:
        own = f"output_{key}"
        names = (own, "output_attentions") if key in WITH_ATTENTIONS else (own,)
        flag = None
        for name in names:
            if flag is None:
                flag = parameters.given(name, args, kwargs)
        if flag is None:
            for name in names:
                flag = flag or config_value(config, name)
        if _asks(key, flag):
            found[key] = flag
    return found


def _asks(key: str, flag: Any) -> bool:
    if key == "hidden_states":  # 0 and [] are selections, not refusals
        return flag is not None and flag is not False
    return bool(flag)


def selection(flag: Any) -> tuple[int, ...] | None:
    """Return the indices of hidden states that `output_hidden_states` selects, None for all."""
    if isinstance(flag, bool):
        return None
    if isinstance(flag, int):
        return (flag,)
    if hasattr(flag, "__index__"):
        return (operator.index(flag),)
    return tuple(int(index) for index in flag)
