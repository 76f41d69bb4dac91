"""The calls a training script may make: `attach`, `step`, `trace`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from rankscope.tree.reader import TraceLike
    from rankscope.tree.views import Trace

__all__ = ["TraceHandle", "attach", "open_trace", "step", "trace"]


def attach(**settings: object) -> None:
    """Trace this process from now on.

    Without arguments it does nothing unless `RANKSCOPE` is set, so it may stay in a training script
    for ever. With arguments (any setting by its keyword: `steps="0-2"`, `out="trace"`) it traces.
    What is wrong with a setting is said once on stderr; the program goes on untraced.
    """
    variables, _ = _loaded("rankscope.settings")
    if variables is None or not (settings or variables.is_enabled()):
        return
    activation, _ = _loaded("rankscope.agent.activation")
    if activation is not None:
        activation.attach(settings)


def step() -> None:
    """Close the current train step here.

    For loops in which neither an optimizer nor the next root forward marks the end of a step. After
    the first call only this function closes train steps. Does nothing where nothing is traced.
    """
    arming = sys.modules.get("rankscope.agent.activation")
    session = arming.current_session() if arming is not None else None
    if session is not None:
        session.step()


def open_trace(
    path: TraceLike | None = None,
    *,
    wait_s: float = 60.0,
    progress: Callable[[str, float], None] | None = None,
) -> Trace:
    """Open a trace; one that is open comes back as it is.

    A folder without trace.json is assembled in memory from what the ranks have sent so far, and
    says so (`is_written`, `is_live`); where every rank has ended and a collector is writing the
    tree, it is waited for.

    Args:
        path: its folder, the trace.json in it, or what `with rankscope.trace(...)` gave; default
            the newest trace here.
        wait_s: how long to wait for a collector that is finishing.
        progress: told what is being done, for anything that takes long.

    Raises:
        FolderError: no such folder, an empty one, or something else than a place of a trace.
        TraceError: not a trace, or a damaged one.
        TraceVersionError: a newer format than this reader knows.
    """
    from rankscope.tree import reader, views
    from rankscope.tree.tensors.globalvalues import full_tensor, local_tensor

    opened = reader.open_trace(path, wait_s=wait_s, progress=progress)
    opened.tensors = views.TensorReaders(local_tensor, full_tensor)
    return opened


class TraceHandle:
    """Yielded by `with rankscope.trace(...)`."""

    def __init__(self, path: Path | None, problem: str = "") -> None:
        self.path = path
        """The trace folder; None if tracing could not begin, or if one rank of several was not told
        `out`. A job of several ranks knows it once the block has ended."""
        self.problem = problem
        """Why `path` is None, as printed to stderr."""

    def __repr__(self) -> str:
        return f"TraceHandle({self.path or self.problem})"

    def open(self) -> Trace:
        """Return the finished trace.

        Raises:
            TraceError: tracing could not begin, or the block has not ended yet.
        """
        from rankscope.errors import TraceError

        if self.path is None:
            raise TraceError(self.problem)
        return open_trace(self.path)


def _loaded(name: str) -> tuple[Any, str]:
    """Return a module of rankscope and "", or None and the printed reason if it cannot be loaded,
    as in a process that may open no more files."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # noqa: BLE001  # the program goes on, whatever is wrong with ours
        problem = f"not tracing: rankscope cannot be loaded ({type(error).__name__}: {error})"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or None
        sys.stderr.write(f"rankscope: {problem}\n")
    return None, problem


@contextmanager
def trace(
    model: nn.Module | None = None, *, out: str | Path | None = None, **settings: object
) -> Iterator[TraceHandle]:
    """Trace what runs inside the block, every step unless `steps` says otherwise.

    Args:
        model: the root whose path is `""`; by default the largest module called.
        out: trace folder, made with its parents; beside one that is not empty a sibling, `out-2`;
            by default `rankscope-<time>` here.
        **settings: any setting by its keyword.

    In a job of several ranks every rank must enter the block, with the same `out`. The tree is in
    place when the block ends; leaving it by an exception writes what was seen until then.

    Nothing that fails in rankscope is raised into the block, a wrong setting or a full disk as
    little as anything else: it is said once on stderr, the block runs untraced, and `open` of what
    this hands out raises it.
    """
    block, problem = _loaded("rankscope.block")
    path, end = None, None
    if block is not None:
        path, problem, end = block.begin_block(model, {"steps": "all", "out": out, **settings})
    handle = TraceHandle(path, problem)
    try:
        yield handle
    finally:
        if end is not None:
            if path is not None:  # of several ranks it is known only now
                handle.path = sys.modules["rankscope.agent.activation"].folder_taken(path)
            end()
