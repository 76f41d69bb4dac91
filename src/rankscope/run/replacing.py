"""Files that a reader sees whole or not at all: written beside their place, then renamed to it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rankscope.errors import FolderError, SpoolError

_LARGEST_JSON = 16 << 20


def read_json_map(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise SpoolError where it is missing, larger than 16 MiB, or none."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise SpoolError(f"{path}: larger than {_LARGEST_JSON} bytes; set it aside")
        decoded = json.loads(path.read_bytes())
    except OSError as error:
        raise SpoolError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpoolError(f"{path}: is no JSON ({error}); set it aside") from error
    if not isinstance(decoded, dict):
        raise SpoolError(f"{path}: expected a JSON object, found {type(decoded).__name__}")
    return decoded


def free_place(out: Path, *, is_folder: bool = False, is_forced: bool = False) -> Path:
    """Return where to write what `--out` names, its links followed and its parents made. With
    `is_folder` that may be an empty folder, with `is_forced` a file that is there.

    Raises:
        FolderError: something else has that name; says what to do.
        OSError: a parent cannot be made.
    """
    place = Path(os.path.realpath(os.path.expanduser(out)))
    is_file = not is_folder and place.is_file()
    is_empty = is_folder and place.is_dir() and not any(place.iterdir())
    if os.path.lexists(place) and not is_empty and not (is_file and is_forced):
        how = "replace it with --force" if is_file else "remove it"
        raise FolderError(f"{out} exists: give a new name with --out, or {how}")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def new_file(path: Path) -> BinaryIO:
    """Make a file for this user alone (0600), as all of a trace is, and open it; raise OSError
    where something has its name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def sync_by_name(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk, or raise OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, *, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Give a new file (0600) that takes the place of `path` when the block ends; `is_synced`: its
    bytes are on disk before they are seen there, and then their name. On OSError the draft is gone:
    a full disk has better use for it."""
    draft = path.with_name(f".{path.name[:60]}.{os.getpid()}.new")  # a name has 255 bytes at most
    try:
        draft.unlink(missing_ok=True)  # of a process that died with our number, or somebody's
        with new_file(draft) as file:
            yield file
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
        if is_synced:
            sync_by_name(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_by_rename(path: Path, text: str) -> None:
    """Write a file (0600): a reader sees all of it or the old one; raise SpoolError."""
    try:
        with replacing(path, is_synced=False) as file:
            file.write(text.encode())
    except OSError as error:
        raise SpoolError(f"{path}: cannot be written: {error.strerror}") from error
