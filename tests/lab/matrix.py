"""`python -m tests.lab.matrix 2.15.0`: the suite with one release of torch, as users get it.

The committed state is cloned into a folder of its own, which gets an environment of its own with
that torch, its Triton and the extra `test`: pip's configuration is switched off, the home is empty,
and of this shell's variables only those that lead pip to its certificates are passed on. The
outcome is one file in `tests/lab/results`, from which `--table` writes the table of
docs/contributing.md. An environment takes 5 to 7 GB and goes afterwards.

Where a run was stopped, the same command goes on behind the last test that ended. After a mend,
`--failed` runs those again that failed in the result file, at the commit of the mend, and the file
and the table say so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = REPOSITORY / "docs" / "contributing.md"
HEADS = ["torch", "Triton", "Python", "passed", "failed", "skipped", "expected failures"]
HEADS += ["minutes on 2 cores", "day and commit"]
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"

ENVIRONMENT = """
set -eu
environment_extra=$1
environment_optional=
. launcher/environment
"""
VERSIONS = """
import importlib.metadata as metadata, json, platform
names = {"torch", "triton", "numpy", "xxhash", "msgpack", "pyzmq", "safetensors", "typer"}
names |= {"pyarrow", "prometheus-client"}
ours = metadata.distributions()
have = {one.metadata["Name"].lower().replace("_", "-"): one.version for one in ours}
versions = {name: have[name] for name in sorted(names & have.keys())}
print(json.dumps({"python": platform.python_version(), **versions}))
"""
FLOOR = re.compile(r'^ *"([\w-]+)>=([\d.]+)[";]', re.MULTILINE)
"""A dependency in pyproject.toml, with the oldest release it may be."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("version", nargs="?", help="release of torch, like 2.15.0")
    parser.add_argument("--python", default=sys.executable, help="the Python to make it of")
    parser.add_argument(
        "--floors", action="store_true", help="everything else at the oldest release that may be"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "rankscope-lab"))
    parser.add_argument(
        "--failed", action="store_true", help="run those again that failed in the result file"
    )
    parser.add_argument("--again", action="store_true", help="forget what a stopped run has done")
    parser.add_argument("--keep", action="store_true", help="leave the environment there")
    parser.add_argument("--table", action="store_true", help=f"write the table of {PAGE.name} only")
    given, arguments = parser.parse_known_args()
    if given.version:
        run = Run(given.version, given.python, given.floors, given.work)
        file = RESULTS / f"{run.name}.json"
        before = json.loads(file.read_text()) if given.failed else None
        if given.again or given.failed:
            run.forget()
        run.prepare()
        result = run.go_on([*arguments, *(before["failed"] if before else [])])
        if before:
            result = mended(before, result)
        if not arguments:
            RESULTS.mkdir(exist_ok=True)
            file.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
        print(row(result))
        for test, why in sorted(result["failed"].items()):
            print(f"  {test}\n    {why}")
        if not given.keep:
            shutil.rmtree(run.folder)
    elif not given.table:
        parser.error("name a release of torch, or --table")
    if given.table or (given.version and not arguments):
        PAGE.write_text(with_table(PAGE.read_text()))
    return 0


class Run:
    """One environment in a folder of its own, and what its run of the suite has given so far."""

    def __init__(self, torch: str, python: str, has_floors: bool, work: Path) -> None:
        said = "import sys; print('%d.%d' % sys.version_info[:2])"
        minor = subprocess.check_output([python, "-c", said], text=True).strip()
        self.name = f"torch-{torch}-python-{minor}" + "-floors" * has_floors
        self.folder = work.resolve() / self.name
        self._torch, self._python, self._has_floors = torch, python, has_floors
        self._tree, self._log = self.folder / "tree", self.folder / "outcomes.jsonl"
        self._revision = git(REPOSITORY, "rev-parse", "--short=9", "HEAD")
        self._state = self.folder / "state.json"

    def forget(self) -> None:
        for file in (self._log, self._state):
            file.unlink(missing_ok=True)

    def prepare(self) -> None:
        """Clone the committed state and make its environment, each unless it is there."""
        if not (self._tree / ".git").exists():
            shutil.rmtree(self._tree, ignore_errors=True)
            self._tree.parent.mkdir(parents=True, exist_ok=True)
            git(REPOSITORY, "clone", "--quiet", "--no-hardlinks", str(REPOSITORY), str(self._tree))
        if git(self._tree, "rev-parse", "--short=9", "HEAD") != self._revision:
            git(self._tree, "fetch", "--quiet", "origin", "HEAD")
            git(self._tree, "checkout", "--quiet", "FETCH_HEAD")
            self.forget()
        extra = "test,parquet,fused" if self._has_floors else "test"
        self._call("bash", "-c", ENVIRONMENT, "environment", extra)

    def go_on(self, arguments: list[str]) -> dict[str, Any]:
        """Run the tests that have not been run, and return the result of all."""
        done = self.folder / "done.txt"
        done.write_text("".join(f"{one['test']}\n" for one in self._outcomes()))
        began = time.monotonic()
        before = json.loads(self._state.read_text())["minutes"] if self._state.exists() else 0
        # written with "=": pytest would take the files for tests, and look for its settings above
        files = [f"--outcomes={self._log}", f"--done={done}"]
        python = str(self._tree / ".venv/bin/python")
        plugin = ["-m", "pytest", "-p", "tests.lab.outcomes", "-p", "no:cacheprovider"]
        try:
            ended = self._call(python, *plugin, *files, "-q", *arguments, is_checked=False)
        finally:
            minutes = before + (time.monotonic() - began) / 60
            self._state.write_text(json.dumps({"minutes": minutes}))
        if ended not in {0, 1, 5}:  # tests passed, tests failed, nothing was left to run
            raise SystemExit(f"pytest ended with {ended} before all tests had run; call this again")
        versions = subprocess.check_output([python, "-c", VERSIONS], text=True)
        return {
            "versions": json.loads(versions),
            "floors": self._has_floors,
            "revision": self._revision,
            "date": date.today().isoformat(),
            "minutes": round(minutes),
            **summary(self._outcomes()),
        }

    def _outcomes(self) -> list[dict[str, str]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [json.loads(line) for line in lines]

    def _call(self, *command: str, is_checked: bool = True) -> int:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        python = Path(shutil.which(self._python) or self._python)
        variables = {
            "HOME": str(home),
            "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHON": str(python),
            "LANG": "C.UTF-8",
            "RANKSCOPE_TORCH": f"torch=={self._torch}",
            "PIP_CONFIG_FILE": os.devnull,
            **{
                name: os.environ[name]
                for name in ("PIP_CERT", "SSL_CERT_FILE")
                if name in os.environ
            },
        }
        if self._has_floors:
            floors = self.folder / "floors.txt"
            floors.write_text(floors_of((self._tree / "pyproject.toml").read_text()))
            variables["PIP_CONSTRAINT"] = str(floors)
        ended = subprocess.run(command, cwd=self._tree, env=variables, check=False).returncode
        if is_checked and ended:
            raise SystemExit(f"{' '.join(command[:2])} ended with {ended} in {self._tree}")
        return ended


def git(folder: Path, *arguments: str) -> str:
    return subprocess.check_output(["git", "-C", str(folder), *arguments], text=True).strip()


def floors_of(pyproject: str) -> str:
    """Return constraints that hold each dependency of a user at its oldest release, but torch."""
    needed, _, extras = pyproject.partition("[project.optional-dependencies]")
    ours = [
        re.search(rf"^{name} = \[\n(.*?)^\]", extras, re.DOTALL | re.MULTILINE)
        for name in ("metrics", "parquet", "fused")
    ]
    found = FLOOR.findall(needed) + [
        each for text in ours if text for each in FLOOR.findall(text[1])
    ]
    return "".join(
        f"{name}=={floor}\n" for name, floor in found if name not in {"torch", "tomli", "hatchling"}
    )


def summary(outcomes: list[dict[str, str]]) -> dict[str, Any]:
    """Return how many tests passed, which failed, and the reasons why others were skipped."""
    counts = Counter(one["outcome"] for one in outcomes)
    skipped = Counter(one["why"] for one in outcomes if one["outcome"] == "skipped")
    bad = {"failed", "error"}
    return {
        "passed": counts["passed"],
        "expected failures": counts["expected failure"],
        "failed": {one["test"]: one["why"] for one in outcomes if one["outcome"] in bad},
        "skipped": dict(sorted(skipped.items())),
    }


def mended(before: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the tests that failed in it as a later commit gives them.

    Raises:
        SystemExit: the later commit has not all of these tests.
    """
    number = again["passed"] + again["expected failures"] + len(again["failed"])
    number += sum(again["skipped"].values())
    if number != len(before["failed"]):
        raise SystemExit(f"{len(before['failed'])} tests had failed, and {number} of them are here")
    said = f"{number} of them at {again['revision']}"
    return {
        **before,
        "again": "; ".join(filter(None, [before.get("again", ""), said])),
        "passed": before["passed"] + again["passed"],
        "expected failures": before["expected failures"] + again["expected failures"],
        "failed": again["failed"],
        "skipped": dict(sorted((Counter(before["skipped"]) + Counter(again["skipped"])).items())),
    }


def row(result: dict[str, Any]) -> str:
    """Return a result as a row of the table."""
    have = result["versions"]
    cells = [
        have["torch"].partition("+")[0] + " (all else at its floor)" * result["floors"],
        have.get("triton", "none"),
        have["python"],
        f"{result['passed']:,}",
        str(len(result["failed"])),
        str(sum(result["skipped"].values())),
        str(result["expected failures"]),
        str(result["minutes"]),
        "; ".join(filter(None, [f"{result['date']}, {result['revision']}", result.get("again")])),
    ]
    return "| " + " | ".join(cells) + " |"


def with_table(page: str) -> str:
    """Return the page with the table of all result files between its two marks. Why tests were
    skipped stands in the result files."""
    files = sorted(RESULTS.glob("*.json"), key=_order)
    results = [json.loads(file.read_text()) for file in files]
    lines = [
        "| " + " | ".join(HEADS) + " |",
        "|---" * len(HEADS) + "|",
        *map(row, results),
        "",
    ]
    failed = [
        f"* {result['versions']['torch'].partition('+')[0]}: `{test}`: {why}"
        for result in results
        for test, why in sorted(result["failed"].items())
    ]
    if failed:
        lines += ["Failed:", "", *failed, ""]
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"{END}{after}"


def _order(file: Path) -> tuple[list[int], str]:
    return [int(part) for part in re.findall(r"\d+", file.stem)], file.stem


if __name__ == "__main__":
    sys.exit(main())
