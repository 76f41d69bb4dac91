"""What a page of a large trace costs, to write and to look at: prints figures, asserts nothing.

    python -m tests.lab.perf.page [--ranks 256] [--modules 2000] [--steps 10] [--trace FOLDER]
    python -m tests.lab.perf.page --page report.html      # looks at this page alone

The trace is made as in tests/lab/page/bigtrace.py (50 s and 8 GiB for the large one), the page is
written in a process of its own. Chromium opens it several times, headless and drawing without a
graphics card, and tells when it first painted and when the map stood; then the map is scrolled, one
leap a frame, with modules and ranks folded and unfolded.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rankscope.tree.reader import open_trace
from rankscope.words.page.pagecontent import write_file
from rankscope.words.page.pages import check_page
from tests.lab.page.bigtrace import big_trace
from tests.page.driven import CHROMIUM, opened

TIMES = 5
FRAMES = """
({leap, frames}) => new Promise((done) => {
  const map = document.querySelector("#scroller");
  map.scrollTop = 0;
  const times = [];
  const one = (now) => {
    times.push(now);
    if (times.length > frames) return done({ times, top: map.scrollTop, height: map.scrollHeight });
    map.scrollTop += leap;
    requestAnimationFrame(one);
  };
  requestAnimationFrame(one);
})
"""
PAINTED = """
() => ({
  paint: performance.getEntriesByType("paint").map((each) => [each.name, each.startTime]),
  loaded: performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd,
  heap: performance.memory ? performance.memory.usedJSHeapSize : 0,
})
"""
STANDS = "() => document.querySelector('#map') && !document.querySelector('#map').hidden"


def write(trace: Path, out: Path) -> None:
    """Write the page of a trace, and print what it took."""
    begin, wall = time.process_time(), time.monotonic()
    write_file(check_page(open_trace(trace))[0], out)
    used, waited = time.process_time() - begin, time.monotonic() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"page written       {used:6.2f} s of one core, {waited:.2f} s, peak {peak:.2f} GiB")


def look(page: Path) -> None:
    """Open a page, scroll its map, and print how fast that was."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    print(f"size               {page.stat().st_size / 1e6:6.2f} MB")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, timeout=120_000)
        paints, stands, heap = [], [], 0.0
        for _ in range(TIMES):
            contexts: list[Any] = []
            begin = time.monotonic()
            driven = opened(browser, contexts, page)
            driven.tab.wait_for_function(STANDS)
            stands.append(time.monotonic() - begin)
            told = driven.tab.evaluate(PAINTED)
            paints.append(dict(told["paint"])["first-contentful-paint"])
            heap = told["heap"]
            if len(paints) < TIMES:
                contexts[0].close()
        print(f"first paint        {statistics.median(paints):6.0f} ms, of {TIMES} times")
        print(f"map stands         {1e3 * statistics.median(stands):6.0f} ms, of {TIMES} times")
        print(f"memory of scripts  {heap / 1e6:6.1f} MB")
        for what, prepare in (
            ("folded", ()),
            ("modules unfolded", ("#unfold-all",)),
            ("ranks unfolded too", ("#groups button",)),
        ):
            for selector in prepare:
                for button in driven.tab.locator(selector).all()[:8]:
                    button.click()
            for leap in (60, 900):
                _scrolled(driven.tab, what, leap)
        if driven.noise:
            print(f"the page was not quiet: {json.dumps(driven.noise)[:2000]}")
        browser.close()


def _scrolled(tab: Any, what: str, leap: int) -> None:
    told = tab.evaluate(FRAMES, {"leap": leap, "frames": 120})
    each = sorted(b - a for a, b in zip(told["times"], told["times"][1:]))
    rate = 1e3 * len(each) / sum(each)
    print(
        f"scrolling {leap:4d} px a frame, {what:18}: {rate:5.1f} frames a second, slowest "
        f"{each[-1]:.0f} ms, 95 of 100 below {each[int(0.95 * len(each))]:.0f} ms "
        f"(at {told['top']:.0f} of {told['height']:.0f} px)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trace", type=Path, help="a trace that is there")
    parser.add_argument("--page", type=Path, help="a page that is there")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.write:
        write(chosen.trace, chosen.write)
        return
    folder = Path(tempfile.mkdtemp(prefix="rankscope-perf-"))
    try:
        trace, page = chosen.trace, chosen.page
        if page is None and trace is None:
            sizes = {"ranks": chosen.ranks, "modules": chosen.modules, "steps": chosen.steps}
            trace = big_trace(folder / "trace", **sizes)
            print(f"{chosen.ranks} ranks x {chosen.modules} modules x {chosen.steps} steps")
        if page is None:
            page = folder / "page.html"
            words = ["--trace", str(trace), "--write", str(page)]
            subprocess.run([sys.executable, "-m", "tests.lab.perf.page", *words], check=True)
        look(page)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
