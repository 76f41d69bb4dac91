"""The start-up file: silent without RANKSCOPE, armed after torch with it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipapp
from pathlib import Path

import pytest

from tests.launcher.ways import installed

START = Path(__file__).parents[2] / "launcher/rankscope_launcher/rankscope.start"
PTH = Path(__file__).parents[2] / "launcher/rankscope_launcher/rankscope.pth"
WAITING = "\nimport sys; print(sum('_AfterTorch' in repr(f) for f in sys.meta_path))"
"""Code that prints how many of our finders are in place."""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has just executed the start-up line, as site does."""
    start = PTH.read_text()
    return subprocess.run(
        [sys.executable, "-c", start + code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_start_up_file_is_one_line_that_site_executes():
    assert len(PTH.read_text().splitlines()) == 1
    assert PTH.read_text().startswith("import ")


@pytest.mark.parametrize("value", ["", "0", "false", "NO", "off"])
def test_without_the_variable_nothing_of_ours_is_imported(value: str):
    done = run(
        "import sys; print([m for m in sys.modules if 'rankscope' in m])" + WAITING, RANKSCOPE=value
    )
    assert done.stdout == "[]\n0\n"
    assert done.stderr == ""


def test_with_the_variable_torch_is_not_imported_but_waited_for():
    done = run(
        "import sys; print('torch' in sys.modules, type(sys.meta_path[0]).__name__,"
        " [m for m in sys.modules if m.startswith('rankscope.')])",
        RANKSCOPE="1",
    )
    assert done.stdout == "False _AfterTorch []\n"
    assert done.stderr == ""


def test_two_start_up_files_wait_for_torch_once():
    done = run(PTH.read_text() + WAITING, RANKSCOPE="1")
    assert done.stdout == "1\n"


def test_looking_for_torch_does_not_use_the_hook_up():
    done = run(
        "import importlib.util as u, sys\n"
        "spec = u.find_spec('torch'); print(spec.loader.get_filename('torch') == spec.origin)\n"
        "import torch\n"
        "from rankscope.agent import activation\n"
        "print(activation.current_session() is not None)\n"
        "print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)" + WAITING,
        RANKSCOPE="1",
    )
    assert done.stdout == "True\nTrue\nSourceFileLoader SourceFileLoader\n0\n", done.stderr
    assert done.stderr == ""


def test_a_torch_that_cannot_be_imported_fails_as_it_would_without_us(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')")
    done = run("import torch", RANKSCOPE="1", PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}")
    assert done.returncode == 1
    assert "broken on purpose" in done.stderr
    assert "rankscope:" not in done.stderr


def test_what_goes_wrong_while_arming_is_one_warning_and_the_program_runs(tmp_path: Path):
    (tmp_path / "torch.py").write_text("")  # no torch at all: the agent cannot be imported
    done = run(
        "import torch; print('trained')",
        RANKSCOPE="1",
        PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}",
    )
    assert done.stdout == "trained\n"
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("rankscope: process ")
    assert "untraced" in done.stderr


def test_a_program_without_torch_never_notices():
    done = run("import json, subprocess; print('done')", RANKSCOPE="1")
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


def test_the_entry_point_of_newer_pythons_does_what_the_line_of_older_ones_does():
    """Python 3.15 calls what `rankscope.start` names and leaves the line in `rankscope.pth`."""
    (line,) = [each for each in START.read_text().splitlines() if not each.startswith("#")]
    code = f"import pkgutil, sys; pkgutil.resolve_name({line!r})()" + WAITING
    code += "; print([m for m in sys.modules if m.startswith('rankscope')])"
    for variable, said in (("1", "1"), ("0", "0")):
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={**os.environ, "RANKSCOPE": variable},
            capture_output=True,
            text=True,
            timeout=300,
        )
        count, modules = done.stdout.splitlines()
        assert count == said, done.stderr
        assert ("rankscope_launcher.startup" in modules) == (variable == "1")
        assert "'rankscope'" not in modules


@installed
@pytest.mark.parametrize(
    ("options", "fires"),
    [(["-I"], True), (["-E"], True), (["-s"], True), (["-S"], False), (["-I", "-S"], False)],
    ids=["isolated", "no variables", "no user site", "no site", "isolated, no site"],
)
def test_the_start_up_file_fires_where_site_packages_are_read(options: list[str], fires: bool):
    done = subprocess.run(
        [sys.executable, *options, "-c", WAITING],
        env={**os.environ, "RANKSCOPE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == f"{int(fires)}\n", done.stderr


@installed
def test_start_up_code_of_others_runs_as_before(tmp_path: Path):
    """A sitecustomize and a usercustomize of the user's, and what an interactive Python starts."""
    (tmp_path / "sitecustomize.py").write_text("print('site')")
    (tmp_path / "usercustomize.py").write_text("print('user')")
    (tmp_path / "startup.py").write_text("print('startup')")
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=WAITING + "\nexit()\n",
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}",
            "PYTHONSTARTUP": str(tmp_path / "startup.py"),
            "RANKSCOPE": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    expected = ["site", *(["user"] if _has_user_site() else []), "startup", "1"]
    assert done.stdout.split() == expected, done.stderr


def _has_user_site() -> bool:
    import site

    return bool(site.ENABLE_USER_SITE)


@installed
def test_two_environments_on_top_of_each_other_fire_twice_and_arm_once(tmp_path: Path):
    """As a virtual environment with system-site-packages, both with rankscope installed."""
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = tmp_path / "bin/python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    (site / "rankscope.pth").write_text(PTH.read_text())
    system = sysconfig.get_path("purelib")
    (site / "system.pth").write_text(f"import site; site.addsitedir({system!r})\n")
    done = subprocess.run(
        [python, "-v", "-c", WAITING],
        env={**os.environ, "RANKSCOPE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "1\n", done.stderr[-2000:]


@installed
def test_a_zipped_program_in_isolated_mode_is_traced(tmp_path: Path):
    """`-I` hides variables of Python's own and the script's folder; ours is another one's."""
    program = tmp_path / "program"
    program.mkdir()
    (program / "__main__.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2)\nmodel(torch.ones(1, 2)).sum().backward()\n"
    )
    zipapp.create_archive(program, tmp_path / "program.pyz")
    done = subprocess.run(
        [sys.executable, "-I", tmp_path / "program.pyz"],
        env={**os.environ, "RANKSCOPE": "1", "RANKSCOPE_OUT": str(tmp_path / "trace")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (tmp_path / "trace/trace.json").exists(), done.stderr


def test_without_the_variable_the_start_up_file_costs_less_than_a_millisecond():
    from tests.lab.perf.startup import measure

    plain_us, ours_us = measure(5)["site, us"]
    assert ours_us - plain_us < 1000
