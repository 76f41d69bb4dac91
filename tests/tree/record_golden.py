"""The records of small jobs from which tests/tree/test_golden.py builds trees, and their sums.

    python -m tests.tree.record_golden sums             # the format changed on purpose
    python -m tests.tree.record_golden jobs [NAME ...]  # the records changed: trace these jobs anew

Jobs are traced in /tmp/rankscope-golden, because the name of a trace folder is recorded. That
folder must not be there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rankscope.tree.build import recover
from tests.archives import pack, unpack

__all__ = ["FILES", "FOLDER", "JOBS", "SUMS", "rebuilt", "unpacked"]

REPOSITORY = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "golden"
SUMS = FOLDER / "sums.json"
FILES = ("trace.json", "tree.json", "steps/000000.safetensors")
_TINY = ["--hidden", "8", "--heads", "2", "--context", "4", "--batch", "4", "--steps", "1"]
_RECORDED = Path("/tmp/rankscope-golden")
JOBS = {
    "ddp": (2, [], ["ddp.py", "--layers", "1", *_TINY]),
    "fsdp2_tp": (4, [], ["fsdp2_tp.py", "--layers", "1", *_TINY]),
    "pipeline": (2, [], ["pipeline.py", "--layers", "2", *_TINY]),
    "by_hand": (
        2,
        ["--rs-layout", "by_hand.toml", "--rs-tensors", "feed.up:output"],
        ["golden_job.py"],
    ),
}
"""Name -> ranks, options of rankscope, script and its options."""


def unpacked(name: str, folder: Path) -> Path:
    """Unpack the records of a job; return their folder."""
    unpack(FOLDER / f"{name}.tar.xz", folder)
    return folder


def rebuilt(records: Path, out: Path) -> dict[str, str]:
    """Build the tree of these records; return the sha256 of each file."""
    recover([records], out)
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in FILES}


def _record(name: str) -> None:
    ranks, options, script = JOBS[name]
    out = _RECORDED / name
    command = [str(Path(sys.executable).with_name("rankscope")), "run", "--rs-out", str(out)]
    command += ["--rs-keep-spool", "--nproc-per-node", str(ranks), *options, *script]
    scripts = _RECORDED / "scripts"  # their paths are recorded too
    shutil.copytree(REPOSITORY / "examples", scripts, dirs_exist_ok=True)
    shutil.copy(Path(__file__).parents[1] / "lab" / "tree" / "golden_job.py", scripts)
    shutil.copy(FOLDER / "by_hand.toml", scripts)
    subprocess.run(command, cwd=scripts, check=True)
    parts = sorted([*out.glob("spool/*"), *out.glob("tensors/*/*")])
    pack(FOLDER / f"{name}.tar.xz", ((str(part.relative_to(out)), part) for part in parts))


def main() -> None:
    """Renew what the arguments name."""
    match sys.argv[1:]:
        case ["sums"]:
            pass
        case ["jobs", *names]:
            _RECORDED.mkdir()
            for name in names or JOBS:
                _record(name)
            shutil.rmtree(_RECORDED)
        case _:
            sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        sums = {
            name: rebuilt(unpacked(name, Path(folder, name, "in")), Path(folder, name, "out"))
            for name in JOBS
        }
    SUMS.write_text(json.dumps(sums, indent=1) + "\n")


if __name__ == "__main__":
    main()
