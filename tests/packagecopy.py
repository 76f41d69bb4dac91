"""A copy of the package, to be changed: what a version with that change would say."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import rankscope
from tests import forked

PACKAGE = Path(rankscope.__file__).parent
REPOSITORY = PACKAGE.parent.parent


def copied(folder: Path) -> Path:
    """Copy the package below a folder; return where it is."""
    package = folder / "src/rankscope"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def answer_of(folder: Path, program: str, *arguments: Path) -> dict[str, Any]:
    """Run a program with the copy below a folder; return the JSON of its last line, which says as
    "package" what it imported."""
    script = folder / "program.py"
    script.write_text(program)
    path = os.pathsep.join(map(str, (folder / "src", REPOSITORY / "launcher", REPOSITORY)))
    done = forked.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(answer["package"]).is_relative_to(folder)
    return answer
