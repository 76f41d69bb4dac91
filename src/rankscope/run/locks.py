"""Who is alive: a rank holds a POSIX record lock on its stream folder for as long as it lives.

The kernel drops such a lock however the process ends, and a forked child does not inherit it.
Asking whether a stream is alive never takes the lock (`F_GETLK`), and never opens the file in the
process that holds it: closing any descriptor of a file drops all its POSIX locks in that process.
The program may do just that (`os.closerange`), so the file also names the process, and whoever is
named there and lives is alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from pathlib import Path

from rankscope.errors import SpoolError, os_errors_as
from rankscope.run.filenames import (
    COMPANION_LOCK_NAME,
    HELD_FOLDER,
    LAUNCHER_LOCK_NAME,
    RUN_NAME,
    START_LOCK_NAME,
    STREAM_LOCK_NAME,
)
from rankscope.run.files import OwnFile, above_standard_streams
from rankscope.run.folders import is_held, stream_folder, streams
from rankscope.run.processes import is_process_alive, process_name

_RETRY_S = 0.2
_FLOCK = struct.Struct("@hhqqi")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""

_locks_here: dict[tuple[int, int], int] = {}
"""(device, inode) of every lock file held by this process, and the process id that locked it."""


class StreamLock:
    """The life of one stream, held from construction to `release` or the end of the process."""

    __slots__ = ("_file", "_path", "_pid")

    def __init__(self, folder: Path) -> None:
        """Lock `folder`. Raises SpoolError if another writer holds it or the file cannot
        be made."""
        self._path = path = folder / STREAM_LOCK_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._pid = os.getpid()
        if _is_held_here(path):
            raise SpoolError(
                f"{folder}: this process already writes this stream; close that writer"
            )
        with os_errors_as(SpoolError, f"{path}: cannot be made"):
            descriptor = above_standard_streams(os.open(path, flags, 0o600))
        deadline = time.monotonic() + _RETRY_S
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN) or time.monotonic() > deadline:
                    os.close(descriptor)
                    raise SpoolError(
                        f"{folder}: another process writes this stream; a rank may run once per "
                        f"incarnation, so a child that inherited RANK must not trace"
                    ) from error
            time.sleep(0.01)
        self._file: OwnFile | None = OwnFile(descriptor)
        # this process must never open the file again: to close that would drop the lock
        _locks_here[self._file.identity] = self._pid
        with contextlib.suppress(OSError):  # a full disk: the lock alone tells
            os.ftruncate(descriptor, 0)
            # the second witness: a program that closes all its descriptors loses the lock and lives
            # on
            os.pwrite(descriptor, process_name(self._pid).encode(), 0)

    def release(self) -> None:
        """Give the lock up. Does nothing in a forked child, nor the second time."""
        file, self._file = self._file, None
        # a forked child has no lock to give up, and must not empty its parent's file
        if file is not None and self._pid == os.getpid():
            _locks_here.pop(file.identity, None)
            with contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            file.close()


def is_alive(folder: Path) -> bool:
    """True while the process that writes this stream folder lives, and has not released its lock.

    Takes no lock itself.
    """
    path = folder / STREAM_LOCK_NAME
    if _is_held_here(path):
        return True
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)  # not known: nobody is called dead
    try:
        # asks for the holder: to take the lock for a moment could make a rank fail to
        # start
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0).ljust(32, b"\0")
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
        name = os.pread(descriptor, 64, 0).decode(errors="replace")
    except OSError:
        return False
    finally:
        os.close(descriptor)
    if _FLOCK.unpack(answer[: _FLOCK.size])[0] != fcntl.F_UNLCK:
        return True
    return is_process_alive(name) and name != process_name(os.getpid())  # itself, before an exec


def is_abandoned(run_folder: Path) -> bool:
    """True for a host's run folder in which nobody is at work: no rank, relay or launcher.

    Without `run.json` it is that of one process that traced itself, once there are records.
    """
    places = [place for place in (run_folder, run_folder / HELD_FOLDER) if place.is_dir()]
    stream_folders = [stream_folder(place, stream) for place in places for stream in streams(place)]
    if not stream_folders and not (run_folder / RUN_NAME).is_file():
        return False
    locks = (LAUNCHER_LOCK_NAME, COMPANION_LOCK_NAME, START_LOCK_NAME)
    return not any(is_held(run_folder / name) for name in locks) and not any(
        is_alive(folder) for folder in stream_folders
    )


def _is_held_here(path: Path) -> bool:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return _locks_here.get((status.st_dev, status.st_ino)) == os.getpid()
