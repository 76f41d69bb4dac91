"""Starting the relay and the collector from a process that must know neither sockets nor threads.

As children (the wrapper) by `subprocess` with the commands below; as daemons (an unchanged script
with the variable alone) by `start_daemon`, which leaves nothing of the caller behind in them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rankscope.errors import SpoolError
from rankscope.run.filenames import COLLECTOR_SOCKET_NAME
from rankscope.run.folders import private_folder, spool_base
from rankscope.run.ownership import open_own_log
from rankscope.run.processes import process_name

LONGEST_IPC_PATH = 107
"""Bytes of a Unix socket's path, its terminating zero left out."""
GROWS_FROM_BYTES = 64 << 20
"""Of records. A job with fewer gets its tree at the end, in one piece."""
_START_S = 10.0


def companion_command(companion: str, run_folder: Path) -> list[str]:
    """The command of a host's `relay`, or of its `collector`: all else stands in `run.json`."""
    return [sys.executable, "-m", "rankscope.gather", companion, "--run-folder", str(run_folder)]


def stepwise_command(out: Path, traced_ranks: int) -> list[str]:
    """The command that goes with a running job step by step; its variables are settings."""
    return [*_stepwise(out), "--traced-ranks", str(traced_ranks)]


def dataset_command(out: Path) -> list[str]:
    """The command that writes what the Parquet dataset lacks of a trace that is finished."""
    return [*_stepwise(out), "--finish-dataset"]


def dataset_trouble() -> str:
    """Return why no Parquet dataset can be written, "" where one can."""
    if importlib.util.find_spec("pyarrow") is None:
        return "no Parquet dataset: pyarrow is missing; pip install 'rankscope[parquet]'"
    return ""


def metrics_trouble(port: int) -> str:
    """Return why a collector cannot serve metrics on this port, "" where it can."""
    if importlib.util.find_spec("prometheus_client") is None:
        return "no metrics: prometheus-client is missing; pip install 'rankscope[metrics]'"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return f"no metrics: port {port} cannot be used: {error.strerror}"
    return ""


def ipc_address(run_folder: Path) -> str:
    """An `ipc://` address beside the spools, or a short one where that path is too long.

    Raises:
        SpoolError: the folder of the short one is another user's, or open to others.
    """
    path = run_folder / COLLECTOR_SOCKET_NAME
    if len(os.fsencode(path)) > LONGEST_IPC_PATH:
        key = hashlib.blake2b(os.fsencode(run_folder.absolute()), digest_size=10).hexdigest()
        base = spool_base(None)
        if len(os.fsencode(base)) + len(key) + 6 > LONGEST_IPC_PATH:
            base = spool_base(Path("/tmp"))
        path = private_folder(base, base) / f"{key}.sock"
    return f"ipc://{path}"


def companion_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a companion: no RANKSCOPE variable, so that it never traces itself.

    Nor the rank variables, nor the job's working directory on the module path, whose entries are
    made absolute because a companion works elsewhere; one thread for numpy; and this package is
    found wherever it was imported from.
    """
    left_out = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONINSPECT")
    kept = {
        name: value
        for name, value in environ.items()
        if name != "RANKSCOPE" and not name.startswith("RANKSCOPE_") and name not in left_out
    }
    package_root = str(Path(__file__).resolve().parents[2])
    given = kept.get("PYTHONPATH", "").split(os.pathsep)
    path = [os.path.abspath(entry) for entry in given if entry]
    if package_root not in path:
        path.append(package_root)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def start_daemon(command: Sequence[str], log: Path, folder: Path) -> str:
    """Start `command` as nobody's child: own session, stdio to `log`, no inherited descriptor.
    Return its name (`run.processes`).

    It works in `folder`, which `-m` puts on the module path of Python 3.10: give one that only this
    user writes. An open descriptor of the job's would keep its readers waiting (`torchrun | cat`).
    The shell forks the daemon and ends, and is reaped here: the rank never has a child it does not
    know.

    Raises:
        SpoolError: it could not be started.
    """
    line = f"exec 3>&1 >&2; {shlex.join(command)} 3>&- & echo $! >&3"
    output = -1
    try:
        output = open_own_log(log)
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            env=companion_environment(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            close_fds=True,
            start_new_session=True,
            timeout=_START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpoolError(f"{shlex.join(command)}: cannot be started: {error}; see {log}") from error
    finally:
        if output >= 0:
            os.close(output)
    if done.returncode:
        raise SpoolError(
            f"{shlex.join(command)}: the shell ended with {done.returncode}; see {log}"
        )
    return process_name(int(done.stdout))


def start_extras(daemons: Iterable[tuple[Sequence[str], Path]]) -> list[str]:
    """Start daemons that a run can do without, each given with its log; return what went wrong."""
    complaints = []
    for command, log in daemons:
        try:
            start_daemon(command, log, log.parent)
        except SpoolError as error:
            complaints.append(str(error))
    return complaints


def _stepwise(out: Path) -> list[str]:
    return [sys.executable, "-m", "rankscope.stepwise", "--out", str(out)]
