"""Disks of a schedule's own: file systems that are filled, that fail, that can only be read.

They are mounted in a mount namespace that ends with the tool (`in_namespace`), whatever ends it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["Disk", "can_mount", "in_namespace"]

_MARK = "SOAK_NAMESPACE"
_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: from then on every use of that file system is an input/output error."""


def in_namespace(module: str) -> None:
    """Start this program again in a mount namespace of its own, where that is allowed and disks
    can be made.
    """
    if _MARK in os.environ:
        return
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # what root alone uses may lie nowhere else
    way = ["unshare", "--mount", "--propagation", "private"]
    allowed = subprocess.run([*way, "true"], capture_output=True, check=False).returncode == 0
    allowed &= shutil.which("mkfs.ext4") is not None
    os.environ[_MARK] = "yes" if allowed else "no"
    if allowed:
        os.execvp(way[0], [*way, sys.executable, "-m", module, *sys.argv[1:]])


def can_mount() -> bool:
    """True inside such a namespace."""
    return os.environ.get(_MARK) == "yes"


class Disk:
    """A small file system mounted at a folder."""

    def __init__(self, place: Path, kind: str, mebibytes: int) -> None:
        self.place, self._kind = place, kind
        self._has_failed = False
        self._image = place.with_suffix(".image")
        place.mkdir()
        if kind == "ext4":
            with self._image.open("wb") as file:
                file.truncate(mebibytes << 20)
            _run("mkfs.ext4", "-q", "-m", "0", str(self._image))
            self._options = ["-t", "ext4", "-o", "loop", str(self._image)]
        else:
            self._options = ["-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs"]
        self._mount()

    def fill(self, leave_bytes: int = 0) -> None:
        """Leave no more room than that."""
        with (self.place / "ballast").open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while self._free_bytes() >= leave_bytes + size and file.write(bytes(size)):
                        pass
                except OSError:
                    continue

    def _free_bytes(self) -> int:
        room = os.statvfs(self.place)
        return room.f_bavail * room.f_frsize

    def make_room(self) -> None:
        (self.place / "ballast").unlink(missing_ok=True)

    def fail(self) -> None:
        """Every use is an input/output error from here on, unless it has failed already."""
        if self._has_failed:
            return
        self._has_failed = True
        folder = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _SHUTDOWN, (0).to_bytes(4, "little"))
        finally:
            os.close(folder)

    def forbid_writing(self) -> None:
        """As the kernel does after an error of the device: read-only, open files too."""
        if self._has_failed:
            return
        self._has_failed = True
        _run("mount", "-o", "remount,abort", str(self.place))

    def replace(self) -> None:
        """Mount it again; nobody may have a file of it open."""
        _run("umount", str(self.place))
        self._mount()
        self._has_failed = False

    def remove(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.place)], capture_output=True, check=False)

    def _mount(self) -> None:
        _run("mount", *self._options, str(self.place))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
