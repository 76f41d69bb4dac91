"""The trace folder before the job starts: made, or refused with the reason."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rankscope.errors import FolderError

__all__ = ["default_trace_folder", "prepare_trace_folder"]

_OF_OTHER_HOSTS = frozenset({"spool"})
"""What hosts that started earlier may already have put into a folder they share."""


def default_trace_folder(now: float | None = None) -> Path:
    """Return `rankscope-<time>` in the current folder; a number follows where that one exists."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    folder = Path.cwd() / f"rankscope-{stamp}"
    number = 1
    while folder.exists():
        number += 1
        folder = Path.cwd() / f"rankscope-{stamp}-{number}"
    return folder


def prepare_trace_folder(folder: Path, *, is_shared: bool = False, is_head: bool = True) -> None:
    """Make the trace folder (0700, with its parents), or accept one that is empty.

    Args:
        folder: where the trace goes.
        is_shared: other hosts write into it too, and may have begun.
        is_head: this host builds the tree, so it is the one that looks for an older trace.

    Raises:
        FolderError: it is a file, holds something, or cannot be made or written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = set(os.listdir(folder))
    except (FileExistsError, NotADirectoryError):
        raise FolderError(
            f"trace folder {folder}: that path, or a part of it, is a file; "
            "choose another with --rs-out"
        ) from None
    except OSError as error:
        raise FolderError(
            f"trace folder {folder}: cannot be made or listed ({error.strerror}); "
            "choose another with --rs-out"
        ) from None
    if is_shared:
        found -= _OF_OTHER_HOSTS
    if found and is_head:
        kind = "a trace" if "trace.json" in found else repr(min(found))
        raise FolderError(
            f"trace folder {folder}: expected an empty folder, found {kind} in it; "
            "choose another with --rs-out, or remove what is there"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FolderError(
            f"trace folder {folder}: not writable for user {os.getuid()}; "
            "choose another with --rs-out"
        )
