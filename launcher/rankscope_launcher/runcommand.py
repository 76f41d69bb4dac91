"""`rankscope run`: torchrun's own command line with one more group of options, traced.

The parser is torchrun's, so every option, `PET_*` variable and exit code stays what it was; the job
runs in this process through `torch.distributed.run.run`. Only this way of starting refuses to start
when something is wrong with the trace: somebody is there to read why.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

from rankscope.errors import FolderError, RankscopeError, SettingError, SpoolError
from rankscope.record.stepselection import Trigger
from rankscope.run.messages import say
from rankscope.settings import SETTINGS, did_you_mean, misspelt_variables, settings_from
from rankscope_launcher.job import JobShape, TracedJob, new_run_id, train_untraced

__all__ = ["main"]

PREFIX = "--rs-"
_PROGRAM = "rankscope run"
_STARTERS = ("accelerate", "deepspeed", "horovodrun", "lightning", "mpiexec", "mpirun", "srun")
"""Commands that start ranks, with options that are not torchrun's."""
_OPTIONS = {PREFIX + setting.name: setting for setting in SETTINGS}


def main(arguments: Sequence[str]) -> None:
    """Run a job exactly as torchrun would, traced.

    Raises:
        SystemExit: 2 where the command line cannot be used, 1 where there is no such script, 0
            after `--help`.
        ChildFailedError: as from torchrun, when a rank failed.
    """
    _open_closed_descriptors()
    job: TracedJob | None = None
    try:
        line = _split(arguments)
        parsed = _parse(line)
        if missing := _missing(parsed, arguments):
            _refuse(SettingError(missing), code=1)  # as torchrun ends, only sooner
        settings, shape = settings_from(line.settings), _shape(parsed)
        # elsewhere ranks may come and go
        if settings.layout is not None and 1 == shape.hosts < shape.world_size:
            settings.layout.mesh(shape.world_size)
        job = TracedJob(settings, shape)
    except (FolderError, SpoolError, OSError) as error:  # of a disk: no reason not to train
        train_untraced(error)
    except (RankscopeError, AssertionError, ValueError) as error:
        _refuse(error)  # the last two are torchrun's own, on --nnodes and --nproc-per-node
    misspelt = misspelt_variables()
    if misspelt:
        say(misspelt)

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record

    failed: BaseException | None = None
    try:
        record(torchrun.run)(parsed)
    except BaseException as error:
        failed = error
        raise
    finally:  # the lines are for the end of the log: behind the traceback of a job that failed
        lines: list[str] = []
        if job is not None:
            job.close(speak=lines.append, error=failed)
        for each in reversed(lines):  # the last that is registered is the first to run
            atexit.register(say, each)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A command line taken apart."""

    settings: dict[str, str]
    """{field: text} of the `--rs-` options."""
    torchrun: list[str]
    """Everything else, in order."""
    places: list[tuple[str, int]]
    """(option, how many of torchrun's arguments stood before it)."""


def _split(arguments: Sequence[str]) -> _Line:
    """Take the `--rs-` options out of a command line.

    Raises:
        SettingError: an option that is unknown, abbreviated, or lacks its value.
    """
    settings: dict[str, str] = {}
    rest: list[str] = []
    places: list[tuple[str, int]] = []
    waiting = list(reversed(arguments))
    while waiting:
        token = waiting.pop()
        if not token.startswith(PREFIX):
            rest.append(token)
            continue
        name, has_value, value = token.partition("=")
        setting = _OPTIONS.get(name)
        if setting is None:
            raise SettingError(_unknown(name))
        if not has_value and setting.is_flag:
            value = "1"
        elif not has_value:
            if not waiting or waiting[-1].startswith("--"):
                raise SettingError(f"{name} wants a value, {setting.metavar}: {setting.help}")
            value = waiting.pop()
        settings[setting.field] = value
        places.append((name, len(rest)))
    return _Line(settings=settings, torchrun=rest, places=places)


def _unknown(name: str) -> str:
    longer = [option for option in _OPTIONS if option.startswith(name)]
    if longer:
        return f"{name} is an abbreviation; write {' or '.join(longer)} in full"
    meant = did_you_mean(name, _OPTIONS)
    return f"{name} is not an option; {meant}`{_PROGRAM} --help` lists all of them"


def _parse(line: _Line) -> argparse.Namespace:
    """Read torchrun's part with torchrun's parser.

    Raises:
        SettingError: what the parser refuses, or an `--rs-` option behind the script.
        SystemExit: 0 after `--help`.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = _PROGRAM
    if not isinstance(parser.get_default("master_port"), str):  # of PET_MASTER_PORT
        parser.set_defaults(master_port=None)
    options = [*_OPTIONS, *re.findall(r"--[a-z][\w-]*", parser.format_help())]
    # one line instead of two pages of usage
    parser.error = lambda message: _raise(message, options)  # type: ignore[method-assign]
    parser.print_help = lambda file=None: _print_help(parser)  # type: ignore[method-assign]
    parsed = parser.parse_args(line.torchrun)
    script_at = len(line.torchrun) - len(parsed.training_script_args) - 1
    for name, before in line.places:
        if before > script_at:
            raise SettingError(
                f"{name} stands behind the script {parsed.training_script}, which would get it; "
                f"put it before: {_PROGRAM} {name} ... {parsed.training_script}"
            )
    _take_any_port(parsed)
    return parsed


def _take_any_port(parsed: argparse.Namespace) -> None:
    """Have a job of one host that names neither rendezvous nor port take a free port.

    Newer torchruns do so themselves. With that of torch 2.8 every such job takes 29500, and the
    second job of a host fails.
    """
    from torch.distributed.run import parse_min_max_nnodes

    if parsed.master_port is None:
        is_static = parsed.rdzv_backend == "static" and not parsed.rdzv_endpoint
        if is_static and parse_min_max_nnodes(parsed.nnodes)[1] == 1:
            parsed.standalone = True
        else:
            parsed.master_port = 29500


def _raise(message: str, options: Sequence[str]) -> NoReturn:
    unknown = re.search(r"unrecognized arguments: (--?[\w-]+)", message)
    meant = did_you_mean(unknown[1], options) if unknown else ""
    raise SettingError(f"{message}; {meant}`{_PROGRAM} --help` lists every option")


def _print_help(torchrun: argparse.ArgumentParser) -> None:
    ours = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} [--rs-... options] <exactly what torchrun takes>",
        description="Run a distributed job as torchrun would, and trace every rank into one tree. "
        "Each option below may also be set as RANKSCOPE_NAME; options of torchrun follow.",
        add_help=False,
    )
    group = ours.add_argument_group("what is traced, and where it goes")
    for option, setting in _OPTIONS.items():
        default = f" (default {setting.default})" if setting.default else ""
        help_text = (setting.help + default).replace("%", "%%")
        if setting.is_flag:
            group.add_argument(option, nargs="?", metavar=setting.metavar, help=help_text)
        else:
            group.add_argument(option, metavar=setting.metavar, help=help_text)
    happenings = "; ".join(trigger.value.meaning for trigger in Trigger)
    ours.add_argument_group(f"what {PREFIX}steps last:N waits for", happenings)
    if sys.stdout is not None:
        sys.stdout.write(ours.format_help() + "\n" + torchrun.format_help())


def _shape(parsed: argparse.Namespace) -> JobShape:
    """Say how large the job is and whether this host is its head."""
    from torch.distributed.run import (
        determine_local_world_size,
        get_rdzv_endpoint,
        parse_min_max_nnodes,
    )

    hosts, most_hosts = parse_min_max_nnodes(parsed.nnodes)
    local_ranks = determine_local_world_size(parsed.nproc_per_node)
    if most_hosts == 1:
        return JobShape(run_id=new_run_id(), hosts=1, local_ranks=local_ranks, is_head=True)
    endpoint: str = get_rdzv_endpoint(parsed) or ""  # type: ignore[no-untyped-call]  # torch's
    # every host of a run computes the same name, from what torchrun itself makes them agree on
    agreed = f"{parsed.rdzv_id}/{endpoint}".encode()
    return JobShape(
        run_id=hashlib.blake2b(agreed, digest_size=16).hexdigest(),
        hosts=max(hosts, 2),
        local_ranks=local_ranks,
        is_head=_is_head(parsed, endpoint),
    )


def _is_head(parsed: Any, endpoint: str) -> bool:
    """Return whether this host is node 0, or holds the rendezvous where nodes have no number."""
    if parsed.rdzv_backend == "static":
        return int(parsed.node_rank) == 0
    host = endpoint.rpartition(":")[0].strip("[]") or endpoint
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, proto=socket.IPPROTO_TCP)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # only an address of this host can be bound
    except OSError:
        return False
    return True


def _missing(parsed: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Return one line on a script, module or command that is not there, "" where the ranks will
    find it, or where only they can tell."""
    name = str(parsed.training_script)
    if name == "-" or "${" in name:  # read from stdin; another one on each rank
        return ""
    if parsed.module:
        if os.environ.get("PYTHON_EXEC") or parsed.no_python or _is_module(name.partition(".")[0]):
            return ""
        return (
            f"no module {name} in {os.getcwd()}, on PYTHONPATH, or installed: nothing was started"
        )
    if parsed.no_python and not parsed.run_path:
        if os.sep in name:
            return "" if os.path.exists(name) else f"{name}: no such command: nothing was started"
        return "" if shutil.which(name) else f"{name}: no such command on PATH: nothing was started"
    if os.path.exists(name) and _may_be_python(name):
        return ""
    script_at = len(arguments) - len(parsed.training_script_args) - 1
    if advice := _advice(list(arguments[:script_at]), list(arguments[script_at:])):
        return f"nothing was started: {advice}"
    where = "" if os.path.isabs(name) else f" in {os.getcwd()}"
    return f"{name}: no such script{where}: nothing was started (a module is run with -m)"


def _may_be_python(name: str) -> bool:
    """False for a file that the Python of the ranks cannot run."""
    if name.endswith((".py", ".pyc")) or not os.path.isfile(name) or os.environ.get("PYTHON_EXEC"):
        return True  # a script fails with its own traceback, and a pipe can be read only once
    try:
        compile(Path(name).read_bytes(), name, "exec")
    except (SyntaxError, ValueError):
        return zipfile.is_zipfile(name)
    except OSError:
        pass
    return True


def _advice(before: Sequence[str], words: Sequence[str]) -> str:
    """Return what to type where a command stands in the place of the script, "" for none.
    `before` is the command line up to there, `words` the rest of it."""
    command, rest = os.path.basename(words[0]), words[1:]
    if is_python := re.fullmatch(r"python[\d.]*", command) is not None:
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[2 if rest[0] in ("-W", "-X") else 1 :]
        if list(rest[:2]) in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            rest = rest[2:]
    if (is_python or command == "torchrun") and rest and rest[0] != "-c":
        left_out = shlex.join(words[: -len(rest)])
        return f"leave out `{left_out}`: {_typed(*before, *rest)}"
    if re.match(r"[A-Za-z_]\w*=", words[0]):
        return f"put {words[0]} in front: {words[0]} {_typed(*before, *rest)}"
    itself = f"starts the ranks itself: RANKSCOPE=1 {shlex.join(words)}"
    if command in _STARTERS:
        return f"{words[0]} {itself}"
    if not shutil.which(words[0]) and not os.path.exists(words[0]):
        return ""
    each = _typed(*before, "--no-python", *words)
    return (
        f"{words[0]} is not a Python script; as the command of each rank: {each}; where it {itself}"
    )


def _typed(*words: str) -> str:
    return f"{_PROGRAM} {shlex.join(words)}"


def _is_module(name: str) -> bool:
    """True for a top module that `python -m` would find from here. Nothing is imported."""
    try:
        found = PathFinder.find_spec(name, [os.getcwd()]) or importlib.util.find_spec(name)
    except ValueError:  # of a module without a spec, which is there
        return True
    return found is not None


def _refuse(error: Exception, code: int = 2) -> NoReturn:
    if sys.stderr is not None:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
    raise SystemExit(code) from None


def _open_closed_descriptors() -> None:
    """Open the null device in place of each standard stream that is closed.

    The next file that is opened would get its number, and what the job's libraries write to stderr
    would go into that file: a lock or a log of ours, in this process and in the ranks.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
