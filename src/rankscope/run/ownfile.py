"""Descriptors in a process whose program may close any, and open files of its own under their
numbers: nothing is written, and nothing closed, before it is asked whether that is still our file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys

Identity = tuple[int, int]
"""Device and inode."""


class OwnFile:
    """A descriptor, and which file it was opened on."""

    # Programs close what they did not open: one that makes a daemon of itself, or clears up before
    # it starts a child, closes every number there is. The next file that it opens has our number,
    # and that may be its checkpoint. So the check stands before every tensor, not once a chunk: a
    # tensor written into a file of the program is a loss that no trace is worth. It is one `fstat`,
    # 1.5 us where storing the smallest tensor takes 10.

    __slots__ = ("identity", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.identity = _identity(number)

    def check(self) -> int:
        """Return the number; raise OSError EBADF where the program has closed it."""
        if _identity(self.number) != self.identity:
            raise OSError(errno.EBADF, "the program has closed it")
        return self.number

    def close(self) -> None:
        """Close it, unless the program has."""
        with contextlib.suppress(OSError):
            os.close(self.check())


def above_standard_streams(descriptor: int) -> int:
    """Move a descriptor off 0 to 2, where a program that closed its stdout would write into it."""
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def map_file(descriptor: int, nbytes: int, **how: int) -> mmap.mmap:
    """Map a file, or raise OSError; `how` are the flags and protection of `mmap.mmap`."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, nbytes, trackfd=False, **how)
    else:
        # it keeps a duplicate: not as 0 to 2, where a program that closed its stdout would write
        low = []
        try:
            while (number := os.dup(descriptor)) < 3:
                low.append(number)
            os.close(number)
            return mmap.mmap(descriptor, nbytes, **how)
        finally:
            for number in low:
                os.close(number)


def leave_mapping(mapped: mmap.mmap, identity: Identity, *, but: int = -1) -> bool:
    """Say before a mapping is let go whether it may be: before Python 3.13 it closes a duplicate of
    its descriptor, and that number may by now be a file of the program's. Then it stays for good.
    `but`: a descriptor of that file that is not the duplicate."""
    if sys.version_info < (3, 13) and not _is_open(identity, but):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))
        return False
    return True


def _is_open(identity: Identity, but: int) -> bool:
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) != but and _identity(int(name)) == identity:
                return True
        except OSError:
            continue
    return False


def _identity(number: int) -> Identity:
    found = os.fstat(number)
    return found.st_dev, found.st_ino
