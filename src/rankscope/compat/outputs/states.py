"""What one call of a captured forward has recorded so far, and whose turn it is to record.

Captures nest when a captured model calls another one. Only the innermost of a thread records: what
a model collects is never mixed with what its submodels collect for themselves. The captures of
transformers count among them, since its models and ours may be parts of each other. Its hooks ask
one variable for the capture that is innermost. While one of ours is, that variable holds None, and
while it holds something, none of ours is.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.capture.torch_internals.compiling import constant_while_tracing
from rankscope.compat.outputs.outputrecorder import be_known_to_transformers, transformers_capturing

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
