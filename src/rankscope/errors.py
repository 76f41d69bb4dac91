"""Every error rankscope raises on purpose.

    RankscopeError
    ├── SettingError          a setting, option or glob that cannot be understood
    ├── FolderError           a trace or spool folder that cannot be used as asked
    │   └── FolderBusyError   another collector already owns the folder
    ├── SpoolError            a spool that cannot be created or read
    │   └── SpoolFullError    a spool that has no room left for this record
    ├── ChunkError            full tensors that cannot be stored, or a chunk that cannot be read
    │   └── ChunkFullError    a tensor that would go beyond the budget
    ├── WireError             a message from the network that breaks the protocol
    ├── BindError             an address rankscope will not listen on
    ├── KeysError             a key file that cannot be used, or must not
    ├── TraceError            a trace that cannot be read
    │   └── TraceVersionError a trace written in a format newer than this reader
    ├── ReplayError           a recorded call that a module cannot be handed
    ├── TrackerError          an experiment tracker that is missing or has no run to write to
    ├── SelectionError        a path, step or rank asked for that the trace does not hold
    └── LayoutError           placements, shapes or offsets that contradict each other

`TensorWarning` is the one warning: about a tensor that is returned all the same.

Each message says who, what was found, what was expected and what to do next. The command line turns
any of them into one line on stderr and exit code 2; inside a training process none of them may
leave rankscope's own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = [
    "BindError",
    "ChunkError",
    "ChunkFullError",
    "FolderBusyError",
    "FolderError",
    "KeysError",
    "LayoutError",
    "RankscopeError",
    "ReplayError",
    "SelectionError",
    "SettingError",
    "SpoolError",
    "SpoolFullError",
    "TensorWarning",
    "TraceError",
    "TraceVersionError",
    "TrackerError",
    "WireError",
    "os_errors_as",
]


class RankscopeError(Exception):
    """Root of everything rankscope raises on purpose.

    `problem` is what is wrong, without what to do about it where that was given apart.
    """

    def __init__(self, problem: str = "", remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem


@contextlib.contextmanager
def os_errors_as(kind: type[RankscopeError], trouble: str, remedy: str = "") -> Iterator[None]:
    """Raise OSErrors of the block as errors of this kind: `<trouble>: <reason>; <remedy>`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{trouble}: {error.strerror}", remedy) from error


class SettingError(RankscopeError):
    """A setting, option or glob that cannot be understood."""


class FolderError(RankscopeError):
    """A trace or spool folder that cannot be used as asked."""


class FolderBusyError(FolderError):
    """Another collector already owns the trace folder."""


class SpoolError(RankscopeError):
    """A spool that cannot be created or read."""


class SpoolFullError(SpoolError):
    """A spool that has no room left: the caller drops the step and writes a gap record later."""


class ChunkError(RankscopeError):
    """Full tensors that cannot be stored, or a chunk of them that cannot be read."""


class ChunkFullError(ChunkError):
    """A tensor that would go beyond the budget: it is left out, smaller ones may still fit."""


class WireError(RankscopeError):
    """A message from the network that breaks the protocol."""


class BindError(RankscopeError):
    """An address rankscope will not listen on."""


class KeysError(RankscopeError):
    """A key file that cannot be used, or that others could read."""


class TraceError(RankscopeError):
    """A trace that cannot be read."""


class TraceVersionError(TraceError):
    """A trace written in a format newer than this reader knows."""


class ReplayError(RankscopeError):
    """A recorded call that a module cannot be handed: it raised, or an argument has to be given."""


class TrackerError(RankscopeError):
    """An experiment tracker that is not known, not installed, or has no run to write to."""


class SelectionError(RankscopeError):
    """A path, step or rank asked for that the trace does not hold."""


class LayoutError(RankscopeError):
    """Placements, shapes or offsets that contradict each other."""


class TensorWarning(UserWarning):
    """About a global tensor that is returned all the same: ranks that should hold the same do not,
    or could not be compared, or the arrangement of its pieces was inferred."""
