"""`python -m tests.lab.pictures`: make the pictures of the README from a job with a fault.

docs/images/terminal.svg is what `rankscope show` prints, docs/images/page.png is the page of
`rankscope report` in Chromium, which has to be on PATH.
"""

from __future__ import annotations

import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
IMAGES: Final = REPOSITORY / "docs" / "images"
EXAMPLE: Final = "examples/forgotten_all_reduce.py"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
COLUMNS: Final = 104
WINDOW: Final = (1200, 1000)
"""Width and height of the page, px."""
LINE_PX, LETTER_PX, EDGE_PX = 18, 8.43, 16


def main() -> None:
    """Trace the example, and write both pictures."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(REPOSITORY / "examples", place / "examples")
        rankscope(place, "run", "--rs-out", "trace", "--nproc-per-node", "2", EXAMPLE)
        IMAGES.mkdir(exist_ok=True)
        lines = rankscope(place, "show", "trace").splitlines()
        (IMAGES / "terminal.svg").write_text(terminal(["$ rankscope show trace", *lines]))
        rankscope(place, "report", "trace", "--out", "report.html")
        photograph(place / "report.html", IMAGES / "page.png")


def rankscope(place: Path, *words: str) -> str:
    """Run a command in a folder, and return what it prints."""
    program = Path(sys.executable).with_name("rankscope")
    variables = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    done = subprocess.run(
        [program, *words],
        cwd=place, env=variables, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def terminal(lines: list[str]) -> str:
    """Return lines of a terminal as SVG; the verdict and the first fault stand out."""
    width, height = round(COLUMNS * LETTER_PX + 2 * EDGE_PX), len(lines) * LINE_PX + 2 * EDGE_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#16191d"/>',
        '<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14"'
        ' fill="#d7dce2">',
    ]
    for number, line in enumerate(lines, start=1):
        is_fault = line.startswith("fault: ") or "first fault: " in line
        colour = ' fill="#ff8a65"' if is_fault else ' fill="#8bd5a2"' if line[:1] == "$" else ""
        text = html.escape(line).replace(" ", "&#160;")  # XML folds spaces
        baseline = EDGE_PX + number * LINE_PX - 4
        parts.append(f'<text x="{EDGE_PX}" y="{baseline}"{colour}>{text}</text>')
    return "\n".join([*parts, "</g>", "</svg>", ""])


def photograph(page: Path, picture: Path) -> None:
    """Open a page in a browser without a window, and write what it shows as PNG."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: install one of {', '.join(BROWSERS)}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--window-size={WINDOW[0]},{WINDOW[1]}", "--virtual-time-budget=4000"]
    subprocess.run(
        [browser, *options, f"--screenshot={picture}", page.as_uri()],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip


if __name__ == "__main__":
    main()
