"""`OutputRecorder`, and what the entries of a model's `_can_record_outputs` ask for.

An entry is a module class, the name of one, a recorder, or a list of these. All of them are read
into `Watch`, the only form that the rest of output capture knows. Recorders of transformers are
read by their fields, so a declaration may hold either kind.

`Capture` is what one call of a captured forward has recorded so far. Captures nest when a captured
model calls another one. Only the innermost of a thread records: what a model collects is never
mixed with what its submodels collect for themselves. The captures of transformers count among them,
since its models and ours may be parts of each other. Its hooks ask one variable for the capture
that is innermost. While one of ours is, that variable holds None, and while it holds something,
none of ours is.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.capture.torch_internals.compiling import constant_while_tracing

DECLARATION = "_can_record_outputs"
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes under which wrappers of torch hold a module: no part of the name its author gave."""


class _Base:
    """What transformers' recorder takes the place of: Python lets no class give up `object`."""


@dataclass
class OutputRecorder(_Base):
    """Which modules one output is recorded from, and which element of what they return.

    A module is chosen by `target_class`, by `class_name`, or by either where both are given;
    `layer_name` then narrows the choice. Fields, order and defaults are those of transformers
    5.23.
    """

    target_class: type[nn.Module] | None
    """Modules of this class and of its subclasses; None leaves the choice to `class_name`."""
    index: int | None = 0
    """Element of a returned tuple or list; negative counts from the end, None takes the whole."""
    layer_name: str | None = None
    """Part of the module's path, whole names only: `mlp.gate` is in `layers.0.mlp.gate`, and
    `attn` is not in `layers.0.self_attn`."""
    class_name: str | None = None
    """End of the module's path or of its class's name, or the full name of one of its bases."""
    capture_initial_hidden_state: bool = True
    """Whether `hidden_states` begin with the input of the first module recorded."""
    num_hidden_layers_key: str = "num_hidden_layers"
    """Accepted for transformers, which counts negative indices from this value of the config.
    They are counted from the states there are here, so nothing reads it."""

    def __post_init__(self) -> None:
        be_known_to_transformers()


def transformers_capturing() -> ModuleType | None:
    """Return transformers' module of output capture, None where the program has not loaded it."""
    return sys.modules.get("transformers.utils.output_capturing")


def be_known_to_transformers() -> None:
    """Make `OutputRecorder`, with all there are already, a kind of the recorder of transformers.

    Its capture, its patching and its backbones read the declarations of all models inside a model,
    and take for a class what is not an instance of their own recorder.
    """
    recorder_class = getattr(transformers_capturing(), "OutputRecorder", None)
    if recorder_class is not None and not issubclass(OutputRecorder, recorder_class):
        OutputRecorder.__bases__ = (recorder_class,)


@dataclass(frozen=True, slots=True)
class Watch:
    """One entry of a declaration: what to record, from which modules of the model that has it."""

    key: str
    target: type[nn.Module] | None
    name: str | None
    layer_name: str | None
    index: int | None
    takes_first_input: bool

    def covers(self, cls: type, path: str) -> bool:
        """True where a module at `path` (a dot before every name, "" for the model) is meant."""
        is_of_target = self.target is not None and issubclass(cls, self.target)
        if not (is_of_target or self._is_named(cls, path)):
            return False
        if self.layer_name is None:
            return True
        part = f".{self.layer_name.strip('.')}."
        return part in f"{path}." or part in f"{_without_wrappers(path)}."

    def _is_named(self, cls: type, path: str) -> bool:
        if self.name is None:
            return False
        return (
            path.endswith(self.name)
            or _without_wrappers(path).endswith(self.name)
            or cls.__name__.endswith(self.name)
            or any(base.__name__ == self.name for base in cls.__mro__)
        )


def _without_wrappers(path: str) -> str:
    return ".".join(name for name in path.split(".") if name not in _WRAPPED)


def read_declaration(declared: Mapping[str, Any] | None) -> tuple[Watch, ...]:
    """Return what a model's `_can_record_outputs` asks for, in its order. Raises TypeError where an
    entry is neither a class, a name, a recorder nor a list of these."""
    return tuple(watch for key, entry in (declared or {}).items() for watch in _watches(key, entry))


def _watches(key: str, entry: Any) -> Iterator[Watch]:
    index = 0 if "hidden_states" in key else 1
    if isinstance(entry, (list, tuple)):
        for recorder in entry:
            yield from _watches(key, recorder)
    elif isinstance(entry, type):
        yield Watch(key, entry, None, None, index, key == "hidden_states")
    elif isinstance(entry, str):
        yield Watch(key, None, entry, None, index, key == "hidden_states")
    elif hasattr(entry, "target_class"):
        yield Watch(
            key,
            entry.target_class,
            getattr(entry, "class_name", None),
            getattr(entry, "layer_name", None),
            getattr(entry, "index", 0),
            key == "hidden_states" and getattr(entry, "capture_initial_hidden_state", True),
        )
    else:
        raise TypeError(
            f"_can_record_outputs[{key!r}] is {entry!r}; it takes a module class, the name of "
            "one, an OutputRecorder, or a list of these"
        )


# ---- whose turn it is to record ------------------------------------------------------------------

Tap = tuple[str, int | None, str | None]
"""Output, element of what the module returns, and, where the module's input comes first, the name
of the parameter that holds it."""

INNERMOST: contextvars.ContextVar[Capture | None] = contextvars.ContextVar(
    "rankscope_innermost_capture", default=None
)


class _Traced:
    """The innermost capture while torch.compile traces, which cannot follow a context variable.

    A trace ends with what it began with, so compiled code never changes it: outside of tracing it
    is None, on every thread.
    """

    def __init__(self) -> None:
        self.innermost: Capture | None = None
        self.theirs: Any = None
        """The variable that holds what the innermost capture of transformers collects. Compiled
        code has a plain attribute of it, `global_var`, which counts while `compiling` is true; else
        its `context_var` does."""


TRACED = _Traced()


@constant_while_tracing
def meet_transformers() -> None:
    """Find the capture of transformers where it has been loaded, and have it know our recorders."""
    collector = getattr(transformers_capturing(), "_active_collector", None)
    if collector is not TRACED.theirs:
        kinds = ("compiling", "context_var", "global_var")
        TRACED.theirs = collector if all(hasattr(collector, name) for name in kinds) else None
    be_known_to_transformers()


def capture_around(model: nn.Module, forward: Callable[..., Any]) -> Capture | None:
    """Return the capture that a decorator further out began for this same call: `super().forward`
    of a decorated forward, or one decorated twice. A model that calls itself begins another."""
    is_traced = torch.compiler.is_dynamo_compiling()
    innermost = TRACED.innermost if is_traced else INNERMOST.get()
    if innermost is None or innermost.model is not model:
        return None
    return None if any(capture.forward is forward for capture in innermost.together) else innermost


@contextlib.contextmanager
def innermost_eagerly(capture: Capture | None) -> Iterator[None]:
    """Make this capture the innermost of the thread while the block runs, None for nothing."""
    meet_transformers()
    collected, token = TRACED.theirs, INNERMOST.set(capture)
    if collected is not None:
        around, their_token = (
            (collected.compiling, collected.global_var),
            collected.context_var.set(None),
        )
        if around[0]:  # this runs behind a graph break, or while a model is exported
            collected.compiling, collected.global_var = False, None
    try:
        yield
    finally:
        INNERMOST.reset(token)
        if collected is not None:
            collected.context_var.reset(their_token)
            if around[0]:
                collected.compiling, collected.global_var = around


def begin_traced(capture: Capture | None) -> tuple[Any, ...]:
    """Do the same in a way that torch.compile can follow."""
    meet_transformers()
    innermost, collected = TRACED.innermost, TRACED.theirs
    TRACED.innermost = capture
    if collected is None:
        return (innermost,)
    around = collected.compiling, collected.global_var
    collected.compiling, collected.global_var = True, None
    return innermost, collected, *around


def end_traced(
    innermost: Capture | None, theirs: Any = None, compiling: bool = False, collected: Any = None
) -> None:
    """Undo `begin_traced`; these are its results."""
    TRACED.innermost = innermost
    if theirs is not None:
        theirs.compiling, theirs.global_var = compiling, collected


class Capture:
    """The values that one call has recorded, by output."""

    def __init__(
        self,
        keys: Iterable[str],
        selected: tuple[int, ...] | None,
        model: nn.Module,
        forward: Callable[..., Any],
    ) -> None:
        self.values: dict[str, list[Any]] = {key: [] for key in keys}
        self.absent: set[str] = set()  # where a module returned None
        self.said: set[str] = set()  # by a warning of its own
        self.model, self.forward = model, forward
        outer = capture_around(model, forward)
        self.together: tuple[Capture, ...] = (self,) if outer is None else (self, *outer.together)
        """Captures of one call by several decorators: each records."""
        self.graph_task = -1
        """The backward that this call runs in, -1 outside: another one recomputes its modules."""
        self._selected = selected
        self._depth = 0 if selected is None else max([0, *(-index for index in selected)])
        """How many of the last hidden states an index from the end could still mean."""

    def records(self, innermost: Capture | None) -> bool:
        """True while this is the innermost capture, or one of the same call is."""
        return innermost is not None and self in innermost.together

    def take(self, tap: Tap, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Record from one call of a module what `tap` says; None is no value."""
        key, index, first_input = tap
        value = output
        if index is not None and isinstance(output, (tuple, list)):
            if not -len(output) <= index < len(output):
                self.said.add(key)
                _warn_of_index(key, index, len(output))
                return
            value = output[index]
        if first_input is not None and not self.values[key]:
            self._add(key, args[0] if args else kwargs.get(first_input))
        if value is None:
            self.absent.add(key)
        else:
            self._add(key, value)

    def _add(self, key: str, value: Any) -> None:
        values = self.values[key]
        if key != "hidden_states" or self._selected is None:
            values.append(value)
            return
        position = len(values)
        values.append(value if self._depth or position in self._selected else None)
        excess = position - self._depth
        if self._depth and excess >= 0 and excess not in self._selected:
            values[excess] = None

    def close(self) -> dict[str, list[Any]]:
        """Return what was recorded; the number of hidden states, and so what an index selects, is
        known now."""
        if self._selected is not None and self._depth:
            values = self.values["hidden_states"]
            count = len(values)
            for position in range(max(0, count - self._depth), count):
                if position not in self._selected and position - count not in self._selected:
                    values[position] = None
        return self.values


def record_eagerly(
    capture: Capture,
    taps: tuple[Tap, ...],
    module: nn.Module,
    args: tuple[Any, ...],
    *kwargs_and_output: Any,
) -> None:
    """Forward hook: record, unless the call belongs to another thread, to another capture, or to a
    backward that runs checkpointed modules again.

    torch leaves the keyword arguments out where the thread of the capture takes the hook off while
    this one is about to run it.
    """
    if not capture.records(INNERMOST.get()) or current_graph_task() != capture.graph_task:
        return
    if TRACED.theirs is None or TRACED.theirs.get() is None:
        kwargs, output = kwargs_and_output
        for tap in taps:
            capture.take(tap, args, kwargs, output)


def record_traced(
    capture: Capture,
    taps: tuple[Tap, ...],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Forward hook while torch.compile traces: what it appends becomes an output of the graph."""
    if capture.records(TRACED.innermost) and getattr(TRACED.theirs, "global_var", None) is None:
        for tap in taps:
            capture.take(tap, args, kwargs, output)


def _warn_of_index(key: str, index: int, count: int) -> None:
    if not torch.compiler.is_dynamo_compiling():
        warnings.warn(
            f"{key}: element {index} was to be recorded from a module that returned {count} "
            "values; nothing was recorded from it",
            stacklevel=2,
        )
