"""The trace folder from outside: its default name, whether it may be used, how it is announced."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable
from pathlib import Path

from rankscope.errors import FolderError, SpoolError
from rankscope.run.filenames import (
    COLLECTOR_LOCK_NAME,
    COLLECTOR_LOG_NAME,
    COLLECTOR_NAME,
    FINDINGS_NAME,
    PARQUET_FOLDER,
    REPLICA_FOLDER,
    STALL_FOLDER,
    STEPS_FOLDER,
    TENSOR_FOLDER,
)
from rankscope.run.ownership import check_folder_found

__all__ = [
    "announced",
    "check_budget",
    "claim_out",
    "default_out",
    "missing_folders",
    "prepare_out",
    "remove_empty",
    "typed",
]

_OF_A_COLLECTOR = frozenset(
    {
        REPLICA_FOLDER,
        COLLECTOR_LOCK_NAME,
        COLLECTOR_NAME,
        COLLECTOR_LOG_NAME,
        TENSOR_FOLDER,
        STALL_FOLDER,
        FINDINGS_NAME,
        STEPS_FOLDER,
        PARQUET_FOLDER,
    }
)
"""What is in a trace folder as long as its tree is not."""


def default_out(folder: Path | None = None) -> Path:
    """Return `rankscope-<time>` in `folder` (by default here), a name nothing has yet.

    Raises:
        FolderError: there is no "here" any more.
    """
    try:
        folder = folder or Path.cwd()
    except OSError as error:
        raise FolderError(
            f"the working folder is gone ({error.strerror}): name the trace folder with --rs-out"
        ) from error
    stem = time.strftime("rankscope-%Y%m%d-%H%M%S")
    path, number = folder / stem, 1
    while path.exists():
        number += 1
        path = folder / f"{stem}.{number}"
    return path


def prepare_out(path: Path, option: str = "--rs-out") -> Path:
    """Make a trace folder (0700, with its parents), or take an empty one.

    Raises:
        FolderError: it holds something, is no folder, or cannot be written; says what to do.
    """
    try:
        is_new = not path.exists()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if next(path.iterdir(), None) is not None:
            raise FolderError(f"{path} is not empty: give a new folder with {option}, or remove it")
        if not is_new:
            check_folder_found(path, option)
    except FileExistsError:
        raise FolderError(
            f"{path} is a file, not a folder: give another name with {option}"
        ) from None
    except OSError as error:
        raise FolderError(
            f"{path} cannot be made or read ({error.strerror}): "
            f"give a folder you may write with {option}"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"{path} cannot be written: give a folder you may write with {option}")
    return path


def claim_out(path: Path, option: str = "--rs-out") -> Path:
    """Make a trace folder, or take one in which other hosts or a collector of the run have begun.

    Raises:
        FolderError: it holds something else, is no folder, or cannot be written.
    """
    for is_last in (False, True):  # another host may be quicker by the blink of an eye
        try:
            if path.is_dir() and set(os.listdir(path)) <= _OF_A_COLLECTOR:
                check_folder_found(path, option)
                break
            prepare_out(path, option)
        except FolderError:
            if is_last:
                raise
        except OSError as error:
            raise FolderError(
                f"{path} cannot be read ({error.strerror}): give another folder with {option}"
            ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"{path} cannot be written: give a folder you may write with {option}")
    return path


def check_budget(folder: Path, budget_bytes: int | None, *, ranks: int) -> None:
    """Refuse a disk without room for the full tensors that ranks may keep.

    Args:
        folder: where they go, or will once it is made.
        budget_bytes: of one rank, as it was asked for; None refuses nothing.
        ranks: how many keep tensors there.

    Raises:
        SpoolError: says what is needed and what is free.
    """
    if budget_bytes is None:
        return
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    found = os.statvfs(existing)
    free = found.f_bavail * found.f_frsize
    if free < budget_bytes * ranks:
        raise SpoolError(
            f"{folder}: {ranks} ranks may keep {budget_bytes >> 20} MiB of full tensors each, "
            f"{free >> 20} MiB are free; give less with --rs-tensor-budget, or another disk with "
            f"--rs-out"
        )


def missing_folders(path: Path) -> list[Path]:
    """Return which of a folder and its parents do not exist yet, the innermost first."""
    return [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, up to the first that holds something."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def typed(command: str, *places: str | Path, out: str | Path | None = None) -> str:
    """Return a command of rankscope as it may be pasted into a shell, whatever the paths hold.

    Args:
        command: its name.
        places: folders it reads.
        out: what follows `--out`, if anything.
    """
    words = ["rankscope", command, *places, *(["--out", out] if out is not None else [])]
    return shlex.join(map(str, words))


def announced(
    out: Path, shown: str | None = None, *, is_complete: bool = True, remark: str = ""
) -> str:
    """Return the line that tells of a finished trace, the same wherever it is printed.

    Args:
        out: the trace folder.
        shown: the folder as it may be typed here; by default the whole path.
        is_complete: every record of every rank is there, and every rank ended in order.
        remark: what has to be known before that, "" for nothing.
    """
    shown = shown or str(out)
    if remark:
        return f"{remark}; what there is lies in {out}: {typed('verify', shown)}"
    if is_complete:
        return f"trace in {out}; read it: {typed('show', shown)}"
    return f"trace in {out}, incomplete: {typed('verify', shown)}"
