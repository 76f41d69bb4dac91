"""`capture_outputs`: hidden states, attentions and router logits of any model, asked for by flags.

The decorated forward hooks the modules that the model's `_can_record_outputs` names, for the time
of one call, and puts what they returned into its own output. Afterwards nothing is left on the
model. Nothing is detached, copied or gathered: a recorded tensor is the one the module returned.

A model's declaration covers its modules down to a submodel that has a declaration of its own, which
covers what is below it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.capture.torch_internals.compiling import (
    constant_while_tracing,
    hook_while_tracing,
    is_compiled_in_place,
    module_with,
    unhook_after_tracing,
    unseen_by_compiler,
)
from rankscope.compat.outputflags import (
    WITH_ATTENTIONS,
    Parameters,
    config_value,
    requested,
    selection,
)
from rankscope.compat.outputrecorder import (
    DECLARATION,
    INNERMOST,
    TRACED,
    Capture,
    Tap,
    Watch,
    begin_traced,
    capture_around,
    end_traced,
    innermost_eagerly,
    meet_transformers,
    read_declaration,
    record_eagerly,
    record_traced,
)

Forward = TypeVar("Forward", bound=Callable[..., Any])


@overload
def capture_outputs(func: Forward, *, tie_last_hidden_states: bool = True) -> Forward: ...
@overload
def capture_outputs(
    func: None = None, *, tie_last_hidden_states: bool = True
) -> Callable[[Forward], Forward]: ...
def capture_outputs(func: Any = None, *, tie_last_hidden_states: bool = True) -> Any:
    """Decorate a forward so that `output_hidden_states=True` and its like work.

    The model says by `_can_record_outputs` what each output is recorded from. `output_<name>` is
    read from the call, else from `self.config`; `output_hidden_states` may also be one index or
    several, counted as in the full list: the others are None then, and not kept alive.
    `return_dict=False` (or in the config) gives a tuple of the values that are not None.

    Args:
        func: the forward; without it the decorator is returned.
        tie_last_hidden_states: put the forward's own `last_hidden_state` in place of the last one
            recorded, which has not gone through the last norm. The config's value of that name
            wins.

    Raises:
        TypeError: (by the call) outputs were asked for and what the forward returns has no place
            for them.
    """
    if func is None:
        return functools.partial(_captured, is_tied=tie_last_hidden_states)
    return _captured(func, is_tied=tie_last_hidden_states)


def _captured(func: Callable[..., Any], *, is_tied: bool) -> Callable[..., Any]:
    parameters = Parameters(func)
    meet_transformers()

    @functools.wraps(func)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        return_dict = kwargs.pop("return_dict", None)
        outer = capture_around(self, forward)
        if return_dict is None and outer is None:
            return_dict = config_value(config, "return_dict")
        declared = getattr(self, DECLARATION, None) or {}
        flags = requested(config, declared, parameters, args, kwargs)
        parameters.drop_unknown(declared, kwargs)
        call = functools.partial(func, self, *args, **kwargs)
        if flags:
            outputs = _capture(self, forward, flags, call, is_tied)
        elif outer is not None:
            outputs = call()
        else:
            outputs = _without_capture(call)
        return _as_tuple(outputs) if return_dict is False else outputs

    return forward


def _capture(
    model: nn.Module, forward: Any, flags: dict[str, Any], call: Callable[[], Any], is_tied: bool
) -> Any:
    capture = Capture(flags, selection(flags.get("hidden_states", True)), model, forward)
    run = _run_traced if torch.compiler.is_dynamo_compiling() else _run
    outputs = run(capture, call)
    values = capture.close()
    states = values.get("hidden_states")
    if states and states[-1] is not None:
        configured = config_value(getattr(model, "config", None), "tie_last_hidden_states")
        last = _last_state_of(outputs)
        if last is not None and (is_tied if configured is None else configured):
            states[-1] = last
    recorded = {key: tuple(tensors) for key, tensors in values.items()}
    for key in flags:
        value = _value_in(outputs, key)
        if not recorded[key] and isinstance(value, tuple) and value:
            del recorded[key]  # a captured model that this forward calls gave it
    empty = tuple(
        key for key, tensors in recorded.items() if not tensors and key not in capture.said
    )
    _warn_of_nothing(id(model), empty, tuple(capture.absent))
    return _with_recorded(outputs, recorded, type(model).__name__)


def _run(capture: Capture, call: Callable[[], Any]) -> Any:
    capture.graph_task = current_graph_task()
    record = unseen_by_compiler(record_eagerly)
    hook_forward = nn.Module.register_forward_hook  # a scripted module's own only refuses
    handles = [
        hook_forward(module, functools.partial(record, capture, taps), with_kwargs=True)
        for module, taps in _modules_to_record(capture.model, tuple(capture.values))
    ]
    try:
        with innermost_eagerly(capture):
            return call()
    finally:
        for handle in handles:
            handle.remove()


@constant_while_tracing
def _warn_of_nothing(identity: int, keys: tuple[str, ...], absent: tuple[str, ...]) -> int:
    """Say why nothing was recorded for some outputs; Python shows it once. For those that are
    `absent` a module returned None. Return 0, for torch.compile."""
    # those that come with attentions are empty in many a right model
    new = [key for key in keys if key not in WITH_ATTENTIONS]
    if new:
        why = _why_nothing(module_with(identity), {*absent} & {*new})
        warnings.warn(f"nothing was recorded for {', '.join(new)}: {why}", stacklevel=4)
    return 0


def _why_nothing(model: nn.Module, absent: set[str]) -> str:
    if absent:
        attention = config_value(getattr(model, "config", None), "_attn_implementation")
        text = f"the modules that should give {', '.join(sorted(absent))} returned None"
        has_reason = "attentions" in absent and attention not in (None, "eager")
        reason = f": {attention!r} computes no weights, attn_implementation='eager' does"
        return text + reason if has_reason else text
    for path, module in model.named_modules():
        if getattr(module, "_orig_mod", None) is not None or is_compiled_in_place(module):
            return (
                f"{path} was compiled before its first capture, and compiled code does not see "
                "hooks that come later. Compile after a first capture, or compile the whole model"
            )
    return (
        f"no module that {type(model).__name__}.{DECLARATION} names ran: the model has no such "
        "module, the forward did not call it, it is inside a TorchScript module, or transformers' "
        "capture_outputs took what it returned"
    )


def _run_traced(capture: Capture, call: Callable[[], Any]) -> Any:
    """As `_run` in a way that torch.compile can follow: constants, and hooks for the trace
    alone."""
    if not torch.compiler.is_dynamo_compiling():  # tracing failed since this was chosen
        return _run(capture, call)
    hooked = [
        hook_while_tracing(
            capture.model.get_submodule(path), functools.partial(record_traced, capture, taps)
        )
        for path, taps in _paths_to_record(id(capture.model), tuple(capture.values))
    ]
    begun = begin_traced(capture)
    try:
        return call()
    finally:
        end_traced(*begun)
        for tables in reversed(hooked):
            unhook_after_tracing(*tables)


def _without_capture(call: Callable[[], Any]) -> Any:
    """Run a captured forward that nothing is asked of: a capture around it sees nothing in it."""
    if torch.compiler.is_dynamo_compiling():
        traced = begin_traced(None)
        try:
            return call()
        finally:
            end_traced(*traced)
    if INNERMOST.get() is None and (TRACED.theirs is None or TRACED.theirs.get() is None):
        return call()
    with innermost_eagerly(None):
        return call()


def select_hidden_states(selection: str | Callable[[Any], int | Sequence[int]]) -> Any:
    """Decorate a method that needs only some hidden states, so that the models it passes its
    keywords to keep no others: `output_hidden_states` is the selection, unless the caller asks for
    hidden states.

    Args:
        selection: name of the method's argument that holds the indices, or a function of the model
            that returns them.
    """

    def decorate(func: Forward) -> Forward:
        signature = inspect.signature(func)

        @functools.wraps(func)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            flag = kwargs.get("output_hidden_states")
            if flag is None or flag is False:
                if isinstance(selection, str):
                    bound = signature.bind(self, *args, **kwargs)
                    bound.apply_defaults()
                    flag = bound.arguments[selection]
                else:
                    flag = selection(self)
                kwargs["output_hidden_states"] = flag
            return func(self, *args, **kwargs)

        return method  # type: ignore[return-value]

    return decorate


_LAST_STATES = ("vision_hidden_states", "last_hidden_state")


def _last_state_of(outputs: Any) -> Any:
    for name in _LAST_STATES:
        value = _value_in(outputs, name)
        if value is not None:
            return value
    return None


def _value_in(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, dict) else getattr(outputs, name, None)


def _with_recorded(outputs: Any, recorded: dict[str, tuple[Any, ...]], model: str) -> Any:
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


def _as_tuple(outputs: Any) -> Any:
    """Return `to_tuple()`, or the values of a mapping or dataclass that are not None, or
    `outputs`."""
    to_tuple = getattr(outputs, "to_tuple", None)
    if to_tuple is not None:
        return to_tuple()
    if isinstance(outputs, (dict, Mapping)):
        return tuple(value for value in outputs.values() if value is not None)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        values = [getattr(outputs, field.name) for field in dataclasses.fields(outputs)]
        return tuple(value for value in values if value is not None)
    return outputs


def _modules_to_record(
    model: nn.Module, keys: tuple[str, ...]
) -> list[tuple[nn.Module, tuple[Tap, ...]]]:
    """Return the modules to record these outputs from, each once, with what to take from it."""
    # behind a graph break this runs as a frame of its own: compiled, it would be again for every
    # other model that comes or goes
    return unseen_by_compiler(_taps_of_modules)(model, keys)


@constant_while_tracing
def _paths_to_record(
    identity: int, keys: tuple[str, ...]
) -> tuple[tuple[str, tuple[Tap, ...]], ...]:
    """Return the same for the model with this `id`, with a path in place of each module."""
    model = module_with(identity)
    paths = {id(module): path for path, module in model.named_modules()}
    return tuple((paths[id(module)], taps) for module, taps in _modules_to_record(model, keys))


def _taps_of_modules(
    model: nn.Module, keys: tuple[str, ...]
) -> list[tuple[nn.Module, tuple[Tap, ...]]]:
    taps_of: dict[nn.Module, dict[Tap, None]] = {}  # a module may be held twice

    def walk(module: nn.Module, path: str, watches: tuple[Watch, ...]) -> None:
        if hasattr(type(module), DECLARATION):
            watches = _declared(module, keys)
        cls: Any = type(module)
        for watch in watches:
            if _covers(watch, cls, path):
                first = _first_parameter(module) if watch.takes_first_input else None
                taps_of.setdefault(module, {})[watch.key, watch.index, first] = None
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{path}.{name}", watches)

    walk(model, "", _declared(model, keys))
    return [(module, (*taps,)) for module, taps in taps_of.items()]


def _declared(model: nn.Module, keys: tuple[str, ...]) -> tuple[Watch, ...]:
    watches = read_declaration(getattr(model, DECLARATION, None))
    return tuple(watch for watch in watches if watch.key in keys)


@functools.lru_cache(maxsize=1 << 14)
def _covers(watch: Watch, cls: Any, path: str) -> bool:
    """As `Watch.covers`, which takes longer than the walk through a model."""
    return watch.covers(cls, path)


def _first_parameter(module: nn.Module) -> str:
    schema: Any = getattr(module.forward, "schema", None)
    if schema:  # TorchScript, whose class has no forward
        names = [argument.name for argument in schema.arguments]
    else:
        names = _parameters(type(module).forward)
    return names[1] if len(names) > 1 else ""


@functools.lru_cache(maxsize=1024)
def _parameters(forward: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # written in C
        return []
