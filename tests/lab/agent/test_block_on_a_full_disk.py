"""A line of rankscope on a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_line_of_ours_that_stderr_has_no_room_for_leaves_the_exit_code_alone(tmp_path: Path):
    """Python flushes its buffers once more at the end: what lies in them then costs code 120."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, rankscope\n"
        "model = torch.nn.Linear(2, 2)\n"
        f"with rankscope.trace(model, out={str(tmp_path / 'trace')!r}, perturb=1):\n"
        "    model(torch.ones(1, 2))\n"
        "sys.exit(7)\n"
    )
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, script], stderr=full, timeout=120).returncode == 7
