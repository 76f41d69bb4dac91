"""`merge_with_config_defaults`: arguments that a call leaves out, from the model's config."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

import rankscope.compat as compat
from rankscope.compat.outputs.causality import configured_causality, in_config
from rankscope.compat.outputs.flags import Parameters, config_value

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
            _warn_of_cache()
            return False
    elif name == "vision_feature_select_strategy" and value not in _STRATEGIES:
        raise ValueError(
            f"vision_feature_select_strategy is {value!r}; it is one of {', '.join(_STRATEGIES)}"
        )
    return value


def _warn_of_cache() -> None:
    if not torch.compiler.is_dynamo_compiling():
        warnings.warn(
            "use_cache=True is of no use while gradient checkpointing trains: it is off here",
            stacklevel=4,
        )


def _with_causality(
    func: Callable[..., Any],
    parameters: Parameters,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    config = getattr(model, "config", None)
    configured = configured_causality(config)
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = configured
    if is_causal is not None and parameters.take("is_causal"):
        kwargs["is_causal"] = is_causal
    if is_causal == configured or config is None or isinstance(config, dict):
        return func(model, *args, **kwargs)
    with in_config(config, is_causal):
        return func(model, *args, **kwargs)
