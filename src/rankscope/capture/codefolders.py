"""Where compiled code of ours lies, and whether nobody else can have put it there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def is_off() -> bool:
    """True where RANKSCOPE_KERNEL asks for no compiled code."""
    return os.environ.get("RANKSCOPE_KERNEL", "").lower() in ("off", "0", "no", "false")


def code_folders() -> Iterator[Path]:
    """Yield where compiled code may lie: the user's cache, else next to the spools."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    home = os.environ.get("HOME", "")
    if os.path.isabs(cache):
        yield Path(cache) / "rankscope"
    elif os.path.isabs(home):
        yield Path(home) / ".cache" / "rankscope"
    yield Path(tempfile.gettempdir()) / f"rankscope-{os.getuid()}" / "kernel"


def trusted_files(name: str) -> Iterator[Path]:
    """Yield the files of this name in the folders of code that nobody else can have put there."""
    for folder in code_folders():
        if _is_safe(folder) and _is_ours(folder / name):
            yield folder / name


def no_folder() -> str:
    """Return why no compiled code of ours can lie on this host, "" where it can."""
    if is_off():
        return "RANKSCOPE_KERNEL switches compiled code off"
    if next(made_folders(), None) is None:
        return f"none of the folders {[*map(str, code_folders())]} can be this user's alone"
    return ""


def made_folders() -> Iterator[Path]:
    """Yield those of `code_folders` that exist now, and in which nobody else can write."""
    for folder in code_folders():
        try:
            for part in (folder.parent, folder):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if _is_safe(folder):
            yield folder


def _is_safe(folder: Path) -> bool:
    return _is_ours(folder.parent) and _is_ours(folder)  # else another folder could take its place


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        status.st_uid == os.getuid()
        and not status.st_mode & 0o022
        and (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode))
    )
