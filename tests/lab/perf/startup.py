"""What the start-up file costs a Python that is not traced: `python tests/lab/perf/startup.py`.

Two figures, each with the file and without it, taken in turns: the time `site` needs for a folder
(inside one process, microseconds) and the wall time of a whole start (noise of milliseconds).
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PTH = Path(__file__).parents[3] / "launcher/rankscope_launcher/rankscope.pth"
INSIDE = """
import site, sys, time
begin = time.perf_counter_ns()
site.addsitedir(sys.argv[1])
print(time.perf_counter_ns() - begin)
"""


def site_us(folder: Path) -> float:
    """Return the microseconds that `site` takes over a folder in a fresh Python."""
    command = [sys.executable, "-I", "-c", INSIDE, str(folder)]
    return int(subprocess.check_output(command, env=environment())) / 1e3


def start_ms(folder: Path) -> float:
    """Return the wall milliseconds of a Python that goes through a folder and ends."""
    command = [sys.executable, "-I", "-c", INSIDE, str(folder)]
    begin = time.perf_counter()
    subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - begin) * 1e3


def environment() -> dict[str, str]:
    """Return our environment without any of our variables."""
    return {name: value for name, value in os.environ.items() if "RANKSCOPE" not in name}


def measure(runs: int) -> dict[str, tuple[float, float]]:
    """Return {figure: (median without the file, median with it)}."""
    with tempfile.TemporaryDirectory() as base:
        without, with_file = Path(base) / "without", Path(base) / "with"
        without.mkdir()
        with_file.mkdir()
        shutil.copy(PTH, with_file)
        figures = {}
        for name, figure in (("site, us", site_us), ("whole start, ms", start_ms)):
            pairs = [(figure(without), figure(with_file)) for _ in range(runs)]
            plain, ours = zip(*pairs)
            figures[name] = (statistics.median(plain), statistics.median(ours))
    return figures


if __name__ == "__main__":
    for name, (plain, ours) in measure(30).items():
        print(f"{name:16} without {plain:9.2f}   with {ours:9.2f}   added {ours - plain:8.2f}")
