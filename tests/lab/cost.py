"""`python -m tests.lab.cost COMMIT`: what rankscope costs here, beside another commit, in one run.

The sources of both are measured by turns, the other first and then this one first, so that what the
machine does besides falls on both. A figure is "not worse" where the median of the pairs is within
two per cent, or 1 lies within their quartiles. Run it on an idle machine, at each milestone.

    python -m tests.lab.cost HEAD~1              # nine pairs: about 10 minutes
    python -m tests.lab.cost main --pairs 3      # a first look
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("costprobe.py")
NOT_WORSE = 1.02
NAMES = ("step", "job")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("commit", help="what to measure beside")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--probe", choices=NAMES, action="append", help="all by default")
    given = parser.parse_args()
    if given.pairs < 1:
        parser.error("--pairs: at least one")
    with tempfile.TemporaryDirectory(prefix="cost-") as folder:
        before = Path(folder)
        parts = ["src", "launcher"]
        archive = ["git", "-C", str(REPOSITORY), "archive", given.commit, *parts]
        taken = subprocess.run(archive, capture_output=True)
        if taken.returncode:
            parser.error(f"{given.commit}: {taken.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=taken.stdout, check=True)
        for root, part in itertools.product((before, REPOSITORY), parts):  # both or none compiled
            compileall.compile_dir(root / part, quiet=2)
        pairs = [_pair(number, before, given.probe or NAMES) for number in range(given.pairs)]
    lines = [verdict([(was[name], now[name]) for was, now in pairs]) for name in pairs[0][0]]
    for name, (line, _) in zip(pairs[0][0], lines, strict=True):
        print(f"{name}: {line}")
    return int(not all(is_fine for _, is_fine in lines))


def _pair(
    number: int, before: Path, probes: tuple[str, ...] | list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    found: dict[Path, dict[str, float]] = {before: {}, REPOSITORY: {}}
    for probe in probes:
        order = (before, REPOSITORY) if number % 2 == 0 else (REPOSITORY, before)
        for tree in order:
            found[tree].update(_measured(tree, probe))
    print(f"pair {number + 1}", file=sys.stderr)
    return found[before], found[REPOSITORY]


def _measured(tree: Path, probe: str) -> dict[str, float]:
    path = os.pathsep.join(str(tree / part) for part in ("src", "launcher"))
    done = subprocess.run(
        [sys.executable, str(PROBE), probe],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tree,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {probe}: {done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def verdict(pairs: list[tuple[float, float]]) -> tuple[str, bool]:
    """Return the line on a figure, and whether it is not worse.

    Args:
        pairs: the figure before and now, of each pair.
    """
    ratios = sorted(now / max(was, sys.float_info.min) for was, now in pairs)
    middle = statistics.median(ratios)
    low, high = ratios[0], ratios[-1]
    if len(ratios) > 2:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    is_fine = middle <= NOT_WORSE or low <= 1 <= high
    was, now = (statistics.median(side) for side in zip(*pairs, strict=True))
    word = "not worse" if is_fine else "WORSE"
    return (
        f"{word}: {middle:.3f} times ({low:.3f} to {high:.3f}); {was:.4g}, now {now:.4g}",
        is_fine,
    )


if __name__ == "__main__":
    sys.exit(main())
