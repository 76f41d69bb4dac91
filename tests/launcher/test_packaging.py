"""What an installed rankscope consists of: wheel and editable install."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest


def test_the_installed_distribution_has_command_entry_point_and_start_up_file():
    try:
        found = distribution("rankscope")
    except PackageNotFoundError:
        pytest.skip("rankscope is on the path but not installed: run launcher/test")
    names = {(e.group, e.name): e.value for e in found.entry_points}
    assert names["console_scripts", "rankscope"] == "rankscope_launcher.command:main"
    assert ("torchrun.logs_specs", "rankscope") in names
    start_up = {str(f): Path(str(f.locate())) for f in found.files or [] if "/" not in str(f)}
    assert start_up["rankscope.pth"].read_text().startswith("import os;")
    assert "rankscope.start" in start_up, "installed before it was there: run launcher/test"


def test_a_module_of_the_same_name_in_front_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "rankscope").mkdir()
    (tmp_path / "rankscope/__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from rankscope_launcher.command import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path}/rankscope/__init__.py; take it off PYTHONPATH" in done.stderr


@pytest.mark.slow
def test_a_wheel_holds_both_packages_and_the_start_up_file_and_works_without_the_source(
    repository: Path, tmp_path: Path
):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", tmp_path, repository],
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("rankscope-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"rankscope.pth", "rankscope.start"} <= names
    assert "rankscope_launcher/startup.py" in names
    assert "rankscope/cli/app.py" in names
    assert {"rankscope/py.typed", "rankscope_launcher/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "examples", "src"))]
    # packages of the running environment, and rankscope from the wheel alone
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv/bin/python"
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    zipfile.ZipFile(wheel).extractall(site)
    code = "import sys; print(type(sys.meta_path[0]).__name__, 'rankscope' in sys.modules)"
    done = subprocess.run(
        [python, "-c", code], env={"RANKSCOPE": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "_AfterTorch False\n", done.stderr
