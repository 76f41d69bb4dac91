"""On what kind of file system a path lies: this host's own, or one that other hosts see too."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

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
    """As the kernel names the file system: `ext4`, `nfs4`, `fuse.sshfs`."""

    @property
    def is_local(self) -> bool:
        """False for what lies elsewhere, and for FUSE, which may."""
        return self.kind not in _NETWORK and not self.kind.startswith("fuse")

    @property
    def revalidates_on_open(self) -> bool:
        """True where only opening a file, not `stat`, is sure to ask the server (NFS)."""
        return self.kind in {"nfs", "nfs4"}


def mount_of(path: Path, table: str = "/proc/mounts") -> Mount | None:
    """Return where a path is mounted, or will be once it is made; None where nobody says."""
    real = Path(os.path.realpath(path))
    try:
        lines = Path(table).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    found: Mount | None = None
    for line in lines:  # a later line lies on top of an earlier one
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = Path(_ESCAPED.sub(lambda m: chr(int(m[1], 8)), words[1]))
        if real.is_relative_to(point) and (
            found is None or len(point.parts) >= len(found.point.parts)
        ):
            found = Mount(point, words[2])
    return found
