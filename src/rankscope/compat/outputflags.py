"""What a call of a captured forward asks for: the `output_*` flags and the index selection, and the
arguments that a call leaves out, from the model's config (`merge_with_config_defaults`).

A flag is looked for among the keywords, then among the positional arguments, then in the model's
config; None means that this place does not say. Masks are built from the config, so a call that
gives `is_causal` has to change it for a while. A config is shared: by submodels, by models, by
threads. The values in it are therefore counted, and whichever call ends last puts back what was
there before the first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

import rankscope.compat as compat

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
    flags = {}
    for key in declared:
        option = f"output_{key}"
        names = (option, "output_attentions") if key in WITH_ATTENTIONS else (option,)
        flag = None
        for name in names:
            if flag is None:
                flag = parameters.given(name, args, kwargs)
        if flag is None:
            for name in names:
                flag = flag or config_value(config, name)
        if _asks(key, flag):
            flags[key] = flag
    return flags


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


# ---- defaults from the config --------------------------------------------------------------------


_ABSENT = object()


@dataclass(slots=True)
class _Override:
    config: Any
    original: Any
    calls: list[tuple[int, bool]] = field(default_factory=list)
    """Thread and value of every call that goes on, in order of their begin."""


_overrides: dict[int, _Override] = {}
"""By `id` of the config, which the entry keeps alive."""
_lock = threading.Lock()


def _configured_causality(config: Any) -> Any:
    """Return what a config says to this thread: what another thread put there is not read."""
    if isinstance(config, dict):
        return config.get("is_causal")
    is_traced = torch.compiler.is_dynamo_compiling()
    override = None if is_traced else _overrides.get(id(config))
    if override is None:
        return getattr(config, "is_causal", None)
    values = [value for thread, value in override.calls if thread == threading.get_ident()]
    if values:
        return values[-1]
    return None if override.original is _ABSENT else override.original


@contextlib.contextmanager
def _in_config(config: Any, is_causal: bool) -> Iterator[None]:
    """Have a config say `is_causal` while the block runs. Two threads that ask one config for
    different values at the same time both see the later one; each still gets its own by keyword."""
    if torch.compiler.is_dynamo_compiling():  # which follows neither locks nor threads
        is_said, before = hasattr(config, "is_causal"), getattr(config, "is_causal", None)
        config.is_causal = is_causal
        try:
            yield
        finally:
            config.is_causal = before
            if not is_said:
                del config.is_causal
        return
    call = (threading.get_ident(), is_causal)
    with _lock:
        override = _overrides.get(id(config))
        if override is None:
            original = getattr(config, "is_causal", _ABSENT)
            override = _overrides[id(config)] = _Override(config, original)
        override.calls.append(call)
        config.is_causal = is_causal
    try:
        yield
    finally:
        with _lock:
            override.calls.remove(call)
            _settle(override)


def _settle(override: _Override) -> None:
    if override.calls:
        override.config.is_causal = override.calls[-1][1]
        return
    del _overrides[id(override.config)]
    if override.original is _ABSENT:
        del override.config.is_causal
    else:
        override.config.is_causal = override.original


Forward = TypeVar("Forward", bound=Callable[..., Any])

_FROM_CONFIG = (
    "use_cache",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_aspect_ratio",
)
_STRATEGIES = ("default", "full")
_DEBUGGING = (("debug_io", False), ("debug_io_dir", "model_debug"), ("prune_layers", False))


def merge_with_config_defaults(func: Forward) -> Forward:
    """Decorate a forward so that what a call leaves out is taken from `self.config`.

    That goes for `use_cache`, `vision_feature_layer`, `vision_feature_select_strategy` and
    `vision_aspect_ratio`; what a call gives, by position or by name, and is not None, stands.
    `use_cache` is off where gradient checkpointing trains. A call's `is_causal` also stands in the
    config while the forward runs, because masks are built from there. A forward is given only what
    it can take.

    With `debug_io=True` the call is written down by `model_addition_debugger_context`, into
    `debug_io_dir` ("model_debug"), all layers unless `prune_layers=True`.

    Raises:
        ValueError: (by the call) `vision_feature_select_strategy` is neither `default` nor `full`.
    """
    parameters = Parameters(func)

    @functools.wraps(func)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        debug = [kwargs.pop(name, default) for name, default in _DEBUGGING]
        if debug[0] and not torch.compiler.is_dynamo_compiling():
            with compat.model_addition_debugger_context(self, debug[1], bool(debug[2])):
                return self.forward(*args, **kwargs)  # once more: it sees what begins in its block
        config = getattr(self, "config", None)
        for name in _FROM_CONFIG:
            value = parameters.given(name, args, kwargs)
            if value is None:
                value = config_value(config, name)
            if value is not None:
                value = _checked(self, name, value)
                args = parameters.with_argument(name, value, args, kwargs)
        return _with_causality(func, parameters, self, args, kwargs)

    return forward  # type: ignore[return-value]


def _checked(model: nn.Module, name: str, value: Any) -> Any:
    if name == "use_cache" and value and model.training:
        if getattr(model, "gradient_checkpointing", False):
            if not torch.compiler.is_dynamo_compiling():
                warnings.warn(
                    "use_cache=True is of no use while gradient checkpointing trains: it is off "
                    "here",
                    stacklevel=3,
                )
            return False
    elif name == "vision_feature_select_strategy" and value not in _STRATEGIES:
        raise ValueError(
            f"vision_feature_select_strategy is {value!r}; it is one of {', '.join(_STRATEGIES)}"
        )
    return value


def _with_causality(
    func: Callable[..., Any],
    parameters: Parameters,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    config = getattr(model, "config", None)
    configured = _configured_causality(config)
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = configured
    if is_causal is not None and parameters.take("is_causal"):
        kwargs["is_causal"] = is_causal
    if is_causal == configured or config is None or isinstance(config, dict):
        return func(model, *args, **kwargs)
    with _in_config(config, is_causal):
        return func(model, *args, **kwargs)
