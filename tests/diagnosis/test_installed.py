"""Rules and exports of another package: those of docs/extending.md, and such as fail."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import rankscope
from tests import forked

PAGE = Path(__file__).parents[2] / "docs/extending.md"
RAISES = "def RULE(step): raise KeyError('no such slot')\n"
NO_CANDIDATE = "def RULE(step): return ['a line']\n"
HANGS = "import threading\ndef RULE(step): threading.Event().wait()\n"


class Dead(torch.nn.Module):
    """A ReLU that lets nothing through."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 200)
        self.act = torch.nn.ReLU()
        torch.nn.init.constant_(self.fc.bias, -100.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x)).sum()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two steps of `Dead`."""
    out = tmp_path_factory.mktemp("dead") / "trace"
    model = Dead()
    with rankscope.trace(model, out=out):
        for _ in range(2):
            model(torch.ones(3, 4)).backward()
            rankscope.step()
    return out


def install(folder: Path, group: str, **modules: tuple[str, str]) -> None:
    """Make a package of {entry point: (module, its text)} that Python finds in a folder."""
    dist = folder / "added-1.0.dist-info"
    dist.mkdir(exist_ok=True)
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    with (dist / "entry_points.txt").open("a") as file:
        file.write(f"[{group}]\n")
        for name, (module, text) in modules.items():
            (folder / f"{module.partition(':')[0]}.py").write_text(text)
            file.write(f"{name} = {module}\n")


def run(folder: Path, *words: object) -> CompletedProcess[str]:
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    return forked.run(
        [sys.executable, "-m", "rankscope", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def examples() -> dict[str, str]:
    """Return the programs of the page by the name of their file."""
    blocks = re.findall(r"```python\n(# (\w+)\.py.*?)```", PAGE.read_text(), re.DOTALL)
    return {name: text for text, name in blocks}


def test_the_rule_of_the_page_finds_what_it_looks_for(trace: Path, tmp_path: Path) -> None:
    install(tmp_path, "rankscope.rules", dead=("dead_outputs:RULE", examples()["dead_outputs"]))
    done = run(tmp_path, "check", trace, "--json")
    assert done.returncode == 0, done.stderr  # a warning
    findings = json.loads(done.stdout)["result"]["findings"]
    found = [(f["kind"], f["path"], f["advice"][:16]) for f in findings]
    assert ("installed-rule", "act", "Look at the lear") in found
    assert run(tmp_path / "nowhere", "check", trace, "--json").stdout.find("installed-rule") < 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RAISES, "failed with KeyError: 'no such slot'"),
        (NO_CANDIDATE, "failed with TypeError: a rule yields candidates, not str"),
        pytest.param(HANGS, "took longer than 10 s for one step", marks=pytest.mark.lab),
        ("RULE = 1 / 0\n", "failed with ZeroDivisionError: division by zero"),
    ],
    ids=["raises", "no-candidate", "hangs", "import-fails"],
)
def test_a_rule_that_fails_is_a_note(trace: Path, tmp_path: Path, text: str, reason: str) -> None:
    sane = examples()["dead_outputs"]
    install(tmp_path, "rankscope.rules", bad=("bad:RULE", text), good=("dead_outputs:RULE", sane))
    done = run(tmp_path, "check", trace, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["result"]
    (note,) = [note for note in report["notes"] if "'bad'" in note]
    assert note == (
        f"the rule 'bad' of the package added {reason}; no step from there on is judged by it"
    )
    assert "installed-rule" in {finding["kind"] for finding in report["findings"]}


def test_the_export_of_the_page_writes_its_file(trace: Path, tmp_path: Path) -> None:
    install(tmp_path, "rankscope.exports", norms=("norms:FORMAT", examples()["norms"]))
    done = run(tmp_path, "export", trace, "--format", "norms", "--out", tmp_path / "norms.csv")
    assert done.returncode == 0, done.stderr
    assert "norms, one a line" in done.stdout
    assert "act,0,0" in (tmp_path / "norms.csv").read_text().splitlines()
    refused = run(tmp_path, "export", trace, "--format", "none", "--out", tmp_path / "none.csv")
    assert refused.returncode == 2
    assert "norms (norms)" in refused.stderr, "it is listed"


def test_an_export_that_cannot_be_loaded_says_why(trace: Path, tmp_path: Path) -> None:
    install(tmp_path, "rankscope.exports", a=("a:FORMAT", "import absent"), b=("b:X", "X = 1\n"))
    for name, reason in (("a", "No module named 'absent'"), ("b", "b:X is not a Format")):
        done = run(tmp_path, "export", trace, "--format", name, "--out", tmp_path / "x")
        assert done.returncode == 2
        assert reason in done.stderr
        assert not (tmp_path / "x").exists()
