"""Descriptors in a process whose program may close any, and open files of its own under their
numbers: nothing is written, and nothing closed, before it is asked whether that is still our file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

__all__ = ["OwnFile", "above_standard_streams"]


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
        """Return the number.

        Raises:
            OSError: EBADF, the program has closed it, whatever has its number now.
        """
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


def _identity(number: int) -> tuple[int, int]:
    """Return device and inode."""
    found = os.fstat(number)
    return found.st_dev, found.st_ino
