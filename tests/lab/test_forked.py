"""A forked Python is like one that was executed, but for the time that importing torch takes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked

LISTS = """
import atexit, os, signal, sys
atexit.register(print, "at exit")
print(__name__, __file__, sys.argv, sys.path, sys.flags, sorted(vars()), sep="\\n")
print(os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), sys.stdout.encoding, sys.stdout.isatty())
print(os.getppid(), os.getpgrp() == os.getpid(), "torch" in sys.modules, "rankscope" in sys.modules)
print([signal.getsignal(n) for n in (1, 2, 13, 15)], signal.pthread_sigmask(signal.SIG_BLOCK, []))
print(sys._getframe().f_back, sys.gettrace(), sys.excepthook is sys.__excepthook__)
"""
PROGRAMS = {
    "lists what it was given": LISTS,
    "raises": "import atexit; atexit.register(print, 1)\ndef f(): raise ValueError(1)\nf()",
    "exits": "import sys; sys.exit(3)",
    "exits with a text": "import sys; sys.exit('why')",
    "leaves": "import os; print('kept?'); os._exit(4)",
    "is interrupted": "raise KeyboardInterrupt",
    "is ended": "import os, time; os.kill(os.getpid(), 15); time.sleep(60)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "aborts": "import os; os.abort()",
    "does not compile": "def (",
    "waits for its threads": "import threading as t, time\n"
    "t.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()",
    "forks": "import os\nif os.fork() == 0: print('child'); raise SystemExit\nprint(os.wait()[1])",
}


def both(words: list[object], **how: Any) -> list[tuple[int, str, str]]:
    """Run a command executed and forked; return exit status, stdout and stderr of each."""
    start = [str(word) for word in words]
    how = {"capture_output": True, "text": True, "timeout": 300, **how}
    runs = [subprocess.run(start, **how), forked.run(start, **how)]
    return [(done.returncode, done.stdout, done.stderr) for done in runs]


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_forked_script_prints_and_ends_as_one_that_was_executed(what: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAMS[what])
    executed, fork = both(
        [sys.executable, script, "--lr", "1"], cwd=tmp_path, input="given\n",
        env={
            **os.environ, "GIVEN": "a variable",
            "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], "", "relative"] * 2),
        },
        start_new_session=True,
    )  # fmt: skip
    assert fork == executed


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import sys; print(__name__, sys.argv, sys.path[:2]); 1/0", "a"],
        ["-u", "-c", "import sys; print(sys.argv, sys.stdout.write_through)"],
        ["-m", "rankscope", "--version"],
        ["-m", "tests.nosuch"],
        ["nosuch.py"],
        ["-W", "error", "-c", "import sys; print(sys.warnoptions)"],
    ],
)
def test_modules_commands_and_options_are_run_too(words: list[object], tmp_path: Path):
    executed, fork = both([sys.executable, *words], cwd=tmp_path)
    assert fork == executed


def test_torch_is_imported_by_the_program_through_every_finder(tmp_path: Path):
    """As the start-up file of rankscope wants it; then it is the torch that anybody imports."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "class Sees:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': print('looked for torch', 'torch' in sys.modules)\n"
        "sys.meta_path.insert(0, Sees())\n"
        "import torch, torch.distributed as dist\n"
        "print(torch.__spec__.name, type(torch.__spec__.loader), torch.__loader__.path)\n"
        "print(torch.ones(3).sum(), dist.is_available(), torch.get_num_threads())\n"
        "import importlib; print(importlib.util.find_spec('torch.nn').name)\n"
    )
    executed, fork = both([sys.executable, script])
    assert fork == executed
    assert executed[0] == 0


def test_random_numbers_that_nobody_seeded_differ_between_forks(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import random, numpy as np, torch, uuid\n"
        "print(random.random(), np.random.rand(), torch.rand(1).item(), uuid.uuid4())\n"
    )
    said = [forked.run([sys.executable, script], stdout=subprocess.PIPE).stdout for _ in range(2)]
    first, second = (line.split() for line in said)
    assert not {*first} & {*second}


def test_a_fork_is_a_child_that_signals_reach_and_that_proc_names(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import sys, time; print('up', flush=True); time.sleep(600)")
    process = forked.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "RANK": "5"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    words = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert words[-1] == os.fsencode(script)
    assert b"RANK=5" in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert os.getpgid(process.pid) == process.pid
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    process.stdout.close()


def test_what_a_forked_launcher_starts_is_its_own_child_and_forked_as_well(tmp_path: Path):
    """Even where the launcher has threads: its children come from a server that has none."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
        "code = 'import os, sys; ran = []; '"
        "'sys.addaudithook(lambda event, _: event == \"exec\" and ran.append(1)); import torch; '"
        "'print(os.getppid(), os.environ[\"OWN\"], len(ran) < 10)'\n"
        "done = subprocess.run([sys.executable, '-u', '-c', code], text=True, capture_output=True,"
        " env={**os.environ, 'OWN': 'yes'})\n"
        "print(done.stdout.split() == [str(os.getpid()), 'yes', 'True'], done.stderr)\n"
        "print(subprocess.run([sys.executable, '-c', 'raise SystemExit(7)']).returncode)\n"
    )
    done = forked.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True \n7\n", "")


def test_a_forked_launcher_that_is_killed_takes_its_server_along_and_leaves_its_children(
    tmp_path: Path,
):
    script, child = tmp_path / "script.py", tmp_path / "child.py"
    child.write_text("import time; print('up', flush=True); time.sleep(600)")
    script.write_text(
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, {str(child)!r}]).pid,"
        " flush=True); input()"
    )
    process = forked.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    number = int(next(line for line in iter(process.stdout.readline, "") if line != "up\n"))
    process.kill()
    assert process.wait() == -signal.SIGKILL
    os.kill(number, 0)  # lives
    os.kill(number, signal.SIGKILL)
    assert process.stdout.read() in {"", "up\n"}, "nobody else holds the launcher's stdout"
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_importing_torch_costs_a_fork_next_to_nothing(tmp_path: Path):
    """What costs is to run the code of hundreds of modules: a fork runs none of them again."""
    script = tmp_path / "script.py"
    script.write_text("import sys; ran = []\n"
                      "sys.addaudithook(lambda event, _: event == 'exec' and ran.append(1))\n"
                      "import torch\nprint(len(ran))")  # fmt: skip
    counts = [int(out) for _, out, _ in both([sys.executable, script])]
    assert counts[1] < 10 < 500 < counts[0], counts
