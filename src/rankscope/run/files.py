"""Files on disks that others use too: written whole or not at all, never through a link that
another user planted, never into a descriptor that the program has reused, with blocks reserved
ahead; and the one decision about what may be removed or freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import json
import mmap
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from rankscope.errors import FolderError, SpoolError, os_errors_as

_LARGEST_JSON = 16 << 20


def read_json_map(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise SpoolError where it is missing, larger than 16 MiB, or none."""
    try:
        # asked before it is read: somebody may have put a file there that fills the memory
        if path.stat().st_size > _LARGEST_JSON:
            raise SpoolError(f"{path}: larger than {_LARGEST_JSON} bytes; set it aside")
        decoded = json.loads(path.read_bytes())
    except OSError as error:
        raise SpoolError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpoolError(f"{path}: is not JSON ({error}); set it aside") from error
    if not isinstance(decoded, dict):
        raise SpoolError(f"{path}: expected a JSON object, found {type(decoded).__name__}")
    return decoded


def free_place(out: Path, *, is_folder: bool = False, is_forced: bool = False) -> Path:
    """Return the path to write for `--out`, with links followed and parents made. `is_folder`
    allows an empty folder, `is_forced` an existing file. Raises FolderError with a remedy if
    something else has that name, OSError if a parent cannot be made."""
    place = Path(os.path.realpath(os.path.expanduser(out)))
    is_file = not is_folder and place.is_file()
    is_empty = is_folder and place.is_dir() and not any(place.iterdir())
    if os.path.lexists(place) and not is_empty and not (is_file and is_forced):
        remedy = "replace it with --force" if is_file else "remove it"
        raise FolderError(f"{out} exists: give a new name with --out, or {remedy}")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def new_file(path: Path) -> BinaryIO:
    """Make and open a file for this user alone (0600). Raises OSError if the name is taken."""
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
    bytes, and then its name, are on disk before it is visible. On OSError the draft is removed,
    because the disk may be full."""
    draft = path.with_name(f".{path.name[:60]}.{os.getpid()}.new")  # a name has 255 bytes at most
    try:
        draft.unlink(missing_ok=True)  # of a process that died with our number, or somebody's
        with new_file(draft) as file:
            yield file
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        # the bytes are on disk by now: a name that survives a loss of power leads to all of them
        os.replace(draft, path)
        if is_synced:
            sync_by_name(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_by_rename(path: Path, text: str) -> None:
    """Write a file (0600): a reader sees all of it or the old one; raise SpoolError."""
    trouble = os_errors_as(SpoolError, f"{path}: cannot be written")
    with trouble, replacing(path, is_synced=False) as file:
        file.write(text.encode())


_UNIT_BYTES = 512
"""Unit of `st_blocks`, whatever the file system's own blocks are."""


def piece_of(path: Path, offset: int, size: int) -> bytes:
    """Return at most `size` bytes of a file, or raise OSError, for a link or a pipe too."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe may stand there
    descriptor = os.open(path, flags)
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)


def bytes_on_disk(status: os.stat_result) -> int:
    """Return what a file takes of the disk: less than its length where it has holes."""
    return min(status.st_size, status.st_blocks * _UNIT_BYTES)


def check_folder_found(path: Path, option: str = "--rs-out") -> None:
    """Raise FolderError for a trace folder that is another user's, or contains links, and OSError
    if it cannot be read. A link to a folder of one's own is fine; `option` names another folder."""
    owner = os.stat(path).st_uid
    if owner not in _our_names(path) and not _is_given_to_root(path):
        raise FolderError(
            f"{path} belongs to another user (uid {owner}), who could send what is written there "
            f"anywhere: name a new folder, or one of your own, with {option}"
        )
    with os.scandir(path) as status:
        for entry in status:
            try:
                is_owned = entry.stat(follow_symlinks=False).st_uid == owner
            except FileNotFoundError:  # the short-lived mark of another host that takes the folder
                continue
            # what is written there later would go where a stranger's link points
            if entry.is_symlink() or not is_owned:
                raise FolderError(
                    f"{entry.path} is a link, or another user's: give a new folder with {option}"
                )


def own_subfolder(path: Path) -> Path:
    """Make a folder (0700) or take our own. Raises OSError for links and other users' folders."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is a link or a file, not a folder", str(path))
    if status.st_uid not in (os.getuid(), path.parent.stat().st_uid):
        raise PermissionError(errno.EPERM, "belongs to another user", str(path))
    return path


def open_own_log(path: Path) -> int:
    """Open a file (0600 if it is new) to append lines; return its descriptor. Raises OSError for a
    link, a pipe, another user's file, or one with a second name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        status = os.fstat(descriptor)
        # asked of the open file: between a look at the name and the open somebody may change it
        is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if not is_plain or status.st_uid not in (os.getuid(), path.parent.stat().st_uid):
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


def map_file(descriptor: int, nbytes: int, **flags: int) -> mmap.mmap:
    """Map a file, or raise OSError; `flags` are the flags and protection of `mmap.mmap`."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, nbytes, trackfd=False, **flags)
    else:
        # it keeps a duplicate: not as 0 to 2, where a program that closed its stdout would write
        low = []
        try:
            while (number := os.dup(descriptor)) < 3:
                low.append(number)
            os.close(number)
            return mmap.mmap(descriptor, nbytes, **flags)
        finally:
            for number in low:
                os.close(number)


def leave_mapping(mapped: mmap.mmap, identity: Identity, *, but: int = -1) -> bool:
    """Keep a mapping for good if it cannot be let go safely; True if it may go. Before Python 3.13
    it closes a duplicate of its descriptor, whose number may be a file of the program's by now.
    `but`: a descriptor of that file that is not the duplicate."""
    if sys.version_info < (3, 13) and not _is_open(identity, but):
        # never collected: its end would close a number that may be the program's checkpoint
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
    status = os.fstat(number)
    return status.st_dev, status.st_ino


_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
"""Flags of linux/falloc.h; the first keeps the length of the file as it is."""
_UNABLE: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EINTR)
_LEAST_FREE_BYTES: Final = 1 << 30
"""Free room below which nothing is reserved ahead: other programs write to the disk too."""


def _find_fallocate() -> Any:
    """Return the C library's fallocate. Not posix_fallocate, which writes into every block on file
    systems without support, and makes the file longer."""
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        function.restype = ctypes.c_int
    return function


_fallocate: Final = _find_fallocate()


def free_bytes(folder: Path) -> int:
    """Return how much this user may write where a folder lies, or will lie, or raise OSError."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    disk = os.statvfs(existing)
    return disk.f_bavail * disk.f_frsize


def reserve(descriptor: int, start: int, nbytes: int) -> bool:
    """Reserve blocks for bytes of a file from `start` on; False if that cannot be done, or less
    than a GiB is free. `ftruncate`, even to the present length, gives back unwritten blocks."""
    if _fallocate is None:
        return False
    try:
        disk = os.fstatvfs(descriptor)
    except OSError:
        return False
    # reserved blocks are taken from everybody: on a disk that is nearly full a trace comes last
    if disk.f_bavail * disk.f_frsize - nbytes < _LEAST_FREE_BYTES:
        return False
    return bool(_fallocate(descriptor, _KEEP_SIZE, start, nbytes) == 0)


def punch_hole(descriptor: int, start: int, nbytes: int) -> bool:
    """Give blocks of a file back, which then read as zeros; False where unable; raise OSError."""
    if _fallocate is None:
        return False
    if _fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, start, nbytes) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number))


_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "cvmfs", "fhgfs", "gfs2", "glusterfs", "gpfs",
        "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs",
        "wekafs",
    }
)  # fmt: skip
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of `/proc/mounts`."""

    point: Path
    kind: str
    """Kernel's name of the file system: `ext4`, `nfs4`, `fuse.sshfs`."""

    @property
    def is_local(self) -> bool:
        """False for file systems on other machines, and for FUSE, which may be."""
        return self.kind not in _NETWORK and not self.kind.startswith("fuse")

    @property
    def revalidates_on_open(self) -> bool:
        """True where only opening a file, not `stat`, is sure to ask the server (NFS)."""
        return self.kind in {"nfs", "nfs4"}


def mount_of(path: Path, table: str = "/proc/mounts") -> Mount | None:
    """Return the mount of a path that may not exist yet; None if it is unknown."""
    real = Path(os.path.realpath(path))
    try:
        lines = Path(table).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    innermost: Mount | None = None
    for line in lines:  # a later line lies on top of an earlier one
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = Path(_ESCAPED.sub(lambda m: chr(int(m[1], 8)), words[1]))
        if real.is_relative_to(point) and (
            innermost is None or len(point.parts) >= len(innermost.point.parts)
        ):
            innermost = Mount(point, words[2])
    return innermost


class Removable(enum.Enum):
    """A kind of records to remove."""

    TURN = "turn"
    """A run of steps of a ring, freed by its rank (`spool.ringwriter`)."""
    SEGMENT = "segment"
    """A full segment of a stream, freed by the relay."""
    STREAM = "stream"
    HELD = "held"
    """What a rank held back. Its copy is a stream, and removed as a stream."""
    REPLICA = "replica"


class Reach(enum.IntEnum):
    """How far copying these records to another place has come."""

    NOWHERE = 0
    BEGUN = 1
    COPIED = 2
    """All records are in another file of this disk."""
    ACKNOWLEDGED = 3
    DURABLE = 4
    """All records are on disk elsewhere, where readers find them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where else one piece is, and who may still want it."""

    reach: Reach
    is_asked: bool = True
    """Somebody asked for these records or may still ask; always true of records not held back."""
    has_writer: bool = False


def may_remove(piece: Removable, place: Place) -> bool:
    """Return whether these records may be removed or freed: the one decision about that. A rank, a
    relay, a collector, the process beside the steps and the commands all remove records; `Place` is
    what each knows about other copies. A full disk is no reason: requested records stay, and the
    rank drops new ones."""
    # a rank that was called lost may still write: what it adds is nowhere else
    if place.has_writer and piece in (Removable.STREAM, Removable.HELD):
        return False
    if piece in (Removable.TURN, Removable.HELD):  # held back: a copy on this disk is enough
        return place.reach >= Reach.COPIED or not place.is_asked
    return place.reach >= Reach.DURABLE
