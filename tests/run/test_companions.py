"""Starting a companion leaves nothing behind: no child, no descriptor, no variable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.errors import SpoolError
from rankscope.run.processes import (
    companion_command,
    companion_environment,
    is_process_alive,
    start_daemon,
    start_extras,
)
from tests.waiting import wait_until


def test_a_command_names_the_module_and_the_run_folder_alone():
    command = companion_command(Path("/run"))
    words = ["-m", "rankscope.companion", "--run-folder", "/run"]
    assert command == [sys.executable, *words]


def test_a_companion_never_sees_what_would_make_it_trace():
    environ = {
        "RANKSCOPE": "1",
        "RANKSCOPE_OUT": "x",
        "RANK": "0",
        "HOME": "/h",
        "PYTHONPATH": "/p",
    }
    kept = companion_environment(environ)
    assert not any(name.startswith("RANKSCOPE") for name in kept)
    assert "RANK" not in kept
    assert kept["HOME"] == "/h"
    assert kept["PYTHONPATH"].startswith("/p" + os.pathsep)


def test_entries_of_the_module_path_stay_where_they_are_for_a_companion_that_works_elsewhere():
    kept = companion_environment({"PYTHONPATH": f"src{os.pathsep}{os.pathsep}/p"})
    assert kept["PYTHONPATH"].split(os.pathsep)[:2] == [os.path.abspath("src"), "/p"]


def test_a_daemon_outlives_its_starter_and_holds_none_of_its_descriptors(tmp_path):
    """A pipe the starter held would stay open at its reader: `torchrun | cat` would hang."""
    code = f"""
import os, sys
from pathlib import Path
from rankscope.run.processes import start_daemon
spare, inherited = os.pipe()
os.set_inheritable(inherited, True)
folder = Path({str(tmp_path)!r})
sleeper = "print('started', flush=True); open('end').read(); print('ended', flush=True)"
print(start_daemon([sys.executable, "-c", sleeper], folder / "log", folder))
try:
    os.waitpid(-1, os.WNOHANG)
    print("has a child")
except ChildProcessError:
    print("has no child")
"""
    os.mkfifo(tmp_path / "end")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    # its pipes were closed, and the daemon lives on
    name, said = done.stdout.splitlines()
    assert said == "has no child"
    assert is_process_alive(name)
    log = tmp_path / "log"
    assert wait_until(lambda: log.read_text() == "started\n"), log.read_text()
    (tmp_path / "end").write_text("")
    assert wait_until(lambda: log.read_text() == "started\nended\n"), log.read_text()
    assert wait_until(lambda: not is_process_alive(name))
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_daemon_that_cannot_be_started_is_told(tmp_path):
    with pytest.raises(SpoolError, match="cannot be started"):
        start_daemon(["true"], tmp_path / "missing" / "log", tmp_path)


def test_neither_companion_imports_torch():
    code = """
import sys
import rankscope.companion.__main__, rankscope.companion.hostcompanion
import rankscope.tree.build
assert "torch" not in sys.modules
import rankscope.run.processes, rankscope.run.folders
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    code = """
import sys, rankscope.run.processes, rankscope.spool.writer
assert "zmq" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_a_daemon_that_cannot_be_started_and_is_not_needed_is_said_and_not_raised(
    tmp_path: Path,
) -> None:
    daemons = [(["true"], tmp_path / "missing" / "log"), (["true"], tmp_path / "log")]
    (complaint,) = start_extras(daemons)
    assert "cannot be started" in complaint
    assert (tmp_path / "log").exists()
