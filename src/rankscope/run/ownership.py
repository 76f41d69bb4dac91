"""Whose a folder or a file is: nothing that another user planted is followed, or written to.

Where others can write (`/tmp`, a shared disk), whoever makes a trace folder of our name before us
could have our records go through links to wherever we may write. So a folder that is there already
has to be this user's own and hold no links, and a file that is appended to has to be a plain one
with a single name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from rankscope.errors import FolderError


def check_folder_found(path: Path, option: str = "--rs-out") -> None:
    """Raise FolderError for a trace folder that is another user's, or holds links, and OSError
    where it cannot be read. A link to a folder of one's own is fine; `option` names another folder.
    """
    owner = os.stat(path).st_uid
    if owner not in _our_names(path) and not _is_given_to_root(path):
        raise FolderError(
            f"{path} belongs to another user (uid {owner}), who could send what is written there "
            f"anywhere: name a new folder, or one of your own, with {option}"
        )
    with os.scandir(path) as found:
        for entry in found:
            if entry.is_symlink() or entry.stat(follow_symlinks=False).st_uid != owner:
                raise FolderError(
                    f"{entry.path} is a link, or another user's: give a new folder with {option}"
                )


def own_subfolder(path: Path) -> Path:
    """Make a folder (0700) in one of ours, or take it; raise OSError for a link or another
    user's."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is a link or a file, not a folder", str(path))
    if found.st_uid not in (os.getuid(), path.parent.stat().st_uid):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))
    return path


def open_own_log(path: Path) -> int:
    """Open a file for lines at its end, made with 0600 where there is none; return its descriptor.
    Raise OSError where it is a link, a pipe, another user's, or has a second name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        found = os.fstat(descriptor)
        is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not is_plain or found.st_uid not in (os.getuid(), path.parent.stat().st_uid):
            raise PermissionError(errno.EPERM, "is not a file of this user alone", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_given_to_root(folder: Path) -> bool:
    """True where this is root, and its owner or root alone could have put the folder there."""
    if os.getuid() != 0:
        return False
    above = os.stat(folder.absolute().parent)
    is_closed = not above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_closed and above.st_uid in (0, os.stat(folder).st_uid)


def _our_names(folder: Path) -> set[int]:
    """Return the user ids of our files in a folder: on a network disk root is somebody else."""
    if os.stat(folder).st_uid == os.getuid():
        return {os.getuid()}
    draft = folder / f".rankscope-{os.getpid()}.owner"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        return {os.getuid()}
    try:
        return {os.getuid(), os.fstat(descriptor).st_uid}
    finally:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
