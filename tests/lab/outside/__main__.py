"""Run the board: `python -m tests.lab.outside [--set SET] [--only NAME] [--proofs]`.

Each program is first proved without the tool: the right one against one process (where one process
does not train the same: against another number of ranks, or nothing), the wrong one unlike the
right one. Then all are traced, checked, and compared with the trace of the reference.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from .answers import ROWS, SETS, Place, Row

HERE = Path(__file__).parent
LATER = ("third", "fourth", "fifth", "sixth")
SOURCES = [str(HERE.parents[2] / "src"), str(HERE.parents[2] / "launcher")]


def rankscope(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command of the tool."""
    return _python("-m", "rankscope", *arguments)


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([*SOURCES, str(HERE)])  # here lie the parts of programs
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False
    )


class Runs:
    """The runs of one program."""

    def __init__(self, name: str, row: Row, folder: Path, board: Path = HERE) -> None:
        self.row, self.script = row, str(board / "programs" / f"{name}.py")
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        if row.prepares:
            self._launch([], 1, "--prepare")

    def plain(self, name: str, ranks: int, *options: str) -> list[dict[str, torch.Tensor]]:
        """Run without the tool; return what each rank holds at the end."""
        save = self.folder / f"{name}.pt"
        self._launch([], ranks, "--save", str(save), *options)
        return [torch.load(f"{save}.rank{rank}") for rank in range(ranks)]

    def traced(self, name: str, ranks: int, *options: str) -> str:
        """Run with the tool; return the folder of the trace."""
        trace = self.folder / name
        if not trace.exists():
            self._launch(["--rs-out", str(trace), "--rs-steps", "0-5"], ranks, *options)
        return str(trace)

    def _launch(self, settings: list[str], ranks: int, *options: str) -> None:
        launcher = ["-m", "rankscope", "run", *settings] if settings else _torchrun()
        file = ["--file", str(self.folder / "checkpoint.pt")]
        done = _python(*launcher, "--nproc-per-node", str(ranks), self.script, *file, *options)
        if done.returncode != 0:
            raise SystemExit(f"{self.script} {options}:\n{done.stdout}{done.stderr}")
        print(done.stdout, end="")


def _torchrun() -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone"]


def distance(
    held: list[dict[str, torch.Tensor]], reference: list[dict[str, torch.Tensor]]
) -> float:
    """Return the largest distance of what ranks hold, relative to the largest element."""
    far = 0.0
    for rank, tensors in enumerate(held):
        other = reference[rank] if len(reference) > rank > 0 else reference[0]
        for name, tensor in tensors.items():
            error = (tensor - other[name]).abs().max() / other[name].abs().max()
            far = max(far, math.inf if tensor.isnan().any() else float(error))
    return far


def prove(name: str, row: Row, runs: Runs) -> str:
    """Prove the right program right and the wrong one wrong, without the tool."""
    right = runs.plain("right", row.ranks)
    wrong = distance(runs.plain("wrong", row.ranks, "--wrong"), right)
    error = 0.0
    if row.reference == "one":
        error = distance(right, runs.plain("one", row.reference_ranks))
    proved = error <= row.tolerance and wrong > 10 * row.tolerance
    return f"{name:14} right {error:.1e}  wrong {wrong:.1e}  {'proved' if proved else 'NOT PROVED'}"


def score(answer: dict, true: Place | None) -> tuple[str, list[dict]]:
    """Return how good the answer of a command is, and its origins."""
    findings = answer["result"]["findings"]
    found = [f for f in findings if f["origin"] or f["severity"] == "warning"]
    faults = [f for f in found if f["severity"] == "fault"]
    if true is None:
        return ("false alarm" if faults else "silent"), found
    if faults and all(true.exact(f) for f in faults):
        return "exact", found
    if any(true.near(f) for f in faults):
        return "found", found
    if any(true.near(f) for f in found):
        return "warned", found
    return ("elsewhere" if faults else "clean"), found


def judge(name: str, row: Row, runs: Runs) -> list[dict]:
    """Trace a program, right and wrong, and score what both commands say of it."""
    right, wrong = runs.traced("t-right", row.ranks), runs.traced("t-wrong", row.ranks, "--wrong")
    beside = row.reference == "one"
    reference = runs.traced("t-one", row.reference_ranks) if beside else right
    asked = [
        (f"{name}", ["check", right], None),
        (f"{name} --wrong", ["check", wrong], row.check),
        (f"{name} --wrong", ["diff", reference, wrong], row.diff),
    ]
    if beside:
        asked.insert(1, (name, ["diff", reference, right], None))
    results = []
    for program, command, true in asked:
        data = rankscope(*command, "--json").stdout
        (word, found) = score(json.loads(data), true)
        kind = "right" if program == name else "wrong"
        stem = runs.folder / f"{command[0]}-{kind}"
        stem.with_suffix(".json").write_text(data)
        if word not in ("silent", "exact"):
            stem.with_suffix(".txt").write_text(rankscope(*command, "--all").stdout)
        results.append({"program": program, "command": command[0], "score": word})
        print(f"{program:22} {command[0]:6} {word}")
        for finding in found[:4]:
            where = f"{finding['path'] or '(root)'}:{finding['slot']}"
            place = f"{finding['phase']} {finding['step']} ranks {finding['ranks']}"
            print(f"    {finding['severity']} {finding['kind']} {where} {place}")
        if len(found) > 4:
            print(f"    and {len(found) - 4} more")
    return results


def load(name: str) -> tuple[dict[str, Row], Path]:
    """Return the rows of a set of programs, and the folder that they lie in."""
    if name not in LATER:
        return SETS.get(name, ROWS), HERE
    return importlib.import_module(f"tests.lab.outside.{name}.answers").ROWS, HERE / name


def main() -> None:
    """Run what was asked for, and print a line for each answer."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--set", choices=[*SETS, *LATER], default="", help="which programs")
    asked.add_argument("--only", nargs="*", help="programs by name")
    asked.add_argument("--proofs", action="store_true", help="prove the programs, without the tool")
    asked.add_argument("--keep", type=Path, help="keep traces and reports here, use those there")
    asked.add_argument("--json", type=Path, help="write the scores here")
    options = asked.parse_args()
    rows, board = load(options.set)
    with tempfile.TemporaryDirectory() as scratch:
        results = []
        for name in options.only or rows:
            runs = Runs(name, rows[name], options.keep or Path(scratch), board)
            if options.proofs:
                print(prove(name, rows[name], runs), flush=True)
            else:
                results += judge(name, rows[name], runs)
                sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    for command in ("check", "diff"):
        words = [r["score"] for r in results if r["command"] == command]
        print(command, {word: words.count(word) for word in sorted(set(words))})


if __name__ == "__main__":
    main()
