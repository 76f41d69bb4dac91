"""Archives of recorded files, the same bytes whoever packs them and whenever."""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterable
from pathlib import Path

__all__ = ["pack", "unpack"]


def pack(archive: Path, files: Iterable[tuple[str, Path]]) -> None:
    """Write a new archive.

    Args:
        archive: its path.
        files: what each is called in there, and where it is.
    """
    with tarfile.open(archive, "w:xz", preset=9) as written:
        for name, path in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = path.stat().st_size, 0o600
            with path.open("rb") as content:
                written.addfile(info, content)


def unpack(archive: Path, folder: Path, tops: Collection[str] = ()) -> None:
    """Unpack the files of an archive, or those in some of its topmost folders.

    `TarFile.extractall` takes its filter from Python 3.11.4 and 3.10.12 on alone.
    """
    with tarfile.open(archive) as packed:
        for member in packed:
            content = packed.extractfile(member)
            if content is not None and (not tops or Path(member.name).parts[0] in tops):
                to = folder / member.name
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(content.read())
