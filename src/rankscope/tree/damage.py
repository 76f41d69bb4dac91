"""One kind of error for whatever is wrong deep inside a trace.

Columns and JSON are read when they are asked for, so a field that is missing, or is not what it
should be, shows long after the file was opened. It then is a TraceError that names file and place
too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rankscope.errors import TraceError

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What reading columns or JSON of another shape than expected raises."""
T = TypeVar("T")


def damage(file: object, error: Exception, where: str = "") -> TraceError:
    """Return what to raise from one of `UNREADABLE`; `where`: in what of the file, a clause with a
    space before it."""
    return TraceError(f"{file}: {type(error).__name__} {error}{where}: the trace is damaged")


def damaged_is_trace_error(view: type[T]) -> type[T]:
    """Make properties and public methods of a class raise TraceError where the data is damaged; its
    instances have `_where.file`, what their data was read from."""
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
