"""Where an export is written: beside its name, under which it appears when it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankscope.errors import FolderError
from rankscope.run.replacing import sync_by_name

__all__ = ["ExportPlace", "claimed"]


@dataclass(frozen=True, slots=True)
class ExportPlace:
    """A hidden folder beside the export's name, removed in the end."""

    target: Path
    """The file or folder to write; becomes the export."""
    scratch: Path
    """Folder for whatever else is needed meanwhile."""


@contextmanager
def claimed(out: Path, *, is_folder: bool) -> Iterator[ExportPlace]:
    """Give a place to write an export; what stands there at the end gets its name by rename.

    However the export ends, nothing half stands under its name, and only SIGKILL leaves the hidden
    folder `.NAME.PID.new` beside it.

    Raises:
        FolderError: `out` exists (an empty folder is taken for a format that makes one).
        OSError: it cannot be written.
    """
    name = out.expanduser().absolute()
    _check_free(name, is_folder=is_folder)
    name.parent.mkdir(parents=True, exist_ok=True)
    draft = name.parent / f".{name.name}.{os.getpid()}.new"
    draft.mkdir(mode=0o700)
    try:
        place = ExportPlace(target=draft / "export", scratch=draft / "scratch")
        place.scratch.mkdir()
        if is_folder:
            place.target.mkdir()
        yield place
        _settle(place.target)
        _check_free(name, is_folder=is_folder)  # somebody else may have been quicker
        os.replace(place.target, name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _check_free(name: Path, *, is_folder: bool) -> None:
    if not os.path.lexists(name):
        return
    if is_folder and name.is_dir() and not name.is_symlink() and not any(name.iterdir()):
        return
    raise FolderError(f"{name} exists: give a new name with --out, or remove it")


def _settle(path: Path) -> None:
    """Make it readable by its owner alone, as the trace is, whatever wrote it, and have it on the
    disk before it gets its name."""
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        each.chmod(0o700 if each.is_dir() else 0o600)
        sync_by_name(each)
