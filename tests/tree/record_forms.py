"""One trace folder in every form that a rankscope has written, and what its commands said of each.

    python -m tests.tree.record_forms NAME ...   # a form is new: write it down, once and for good

A form that was released is never recorded anew: whoever reads traces reads these.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rankscope.cli.app import main as rankscope_main
from rankscope.tree.build import recover
from tests.archives import pack, unpack
from tests.companion.running.growing import grown
from tests.tree import record_golden
from tests.tree.jobs import grid_job

FOLDER = Path(__file__).parent / "forms"
PIECES = 20


def _columns(records: Path, trace: Path) -> None:
    recover([record_golden.unpacked("by_hand", records)], trace)


def _half_grown(records: Path, trace: Path) -> None:
    """Of a job whose hosts went down: finished steps, their index and the records behind them."""
    for _ in grown(_steps(records), trace, pieces=PIECES):
        if len((trace / "steps/index.jsonl").read_text().splitlines()) > 1:
            return
    raise AssertionError("no step was settled before the job ended")


def _steps(records: Path) -> Path:
    grid_job(records / "spools", records / "trace", steps=6)
    return records / "trace"


FORMS: dict[str, Callable[[Path, Path], None] | None] = {
    **dict.fromkeys(["inline", "split", "tensors", "grown", "half-grown", "lives"]),
    "columns": _columns,
    "half-grown-columns": _half_grown,
}
"""Who writes each; None where only an older rankscope did."""


def said(trace: Path, work: Path) -> dict[str, str]:
    """Return what commands say of a trace, by the names of files; of one that is not finished, what
    they say of its recovered tree.

    Args:
        trace: the folder.
        work: an empty one.
    """
    if not (trace / "trace.json").exists():
        recover([trace], work / "recovered")
        trace = work / "recovered"
    _ran("export", trace, "--format", "jsonl", "--out", work / "values.jsonl")
    return {
        "check.json": _ran("check", trace, "--json"),
        "diff.json": _ran("diff", trace, trace, "--json"),
        "verify.json": _ran("verify", trace, "--json"),
        "top.json": _ran("top", trace, "--once", "--json"),
        "values.jsonl": (work / "values.jsonl").read_text(),
    }


def _ran(*words: object) -> str:
    """Run a command in this process; return what it wrote on stdout."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        rankscope_main([*map(str, words)])
    return out.getvalue()


def unpacked(name: str, folder: Path) -> tuple[Path, dict[str, str]]:
    """Unpack a form; return its trace folder, and what commands said of it."""
    unpack(FOLDER / f"{name}.tar.xz", folder)
    return folder / "trace", {p.name: p.read_text() for p in (folder / "said").iterdir()}


def record(name: str) -> None:
    """Write a form and what commands say of it."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        trace, spoken = home / "trace", home / "said"
        write = FORMS[name]
        if write is None:
            sys.exit(f"{name}: an older rankscope wrote this form; it cannot be written any more")
        write(home / "records", trace)
        spoken.mkdir()
        (home / "work").mkdir()
        for file, text in said(trace, home / "work").items():
            assert text, file
            (spoken / file).write_text(text.replace(str(home), ""))
        FOLDER.mkdir(exist_ok=True)
        parts = sorted(p for top in (trace, spoken) for p in top.glob("**/*") if p.is_file())
        pack(FOLDER / f"{name}.tar.xz", ((str(p.relative_to(home)), p) for p in parts))


if __name__ == "__main__":
    os.environ["NO_COLOR"] = "1"
    for asked in sys.argv[1:] or sys.exit(__doc__):
        record(asked)
