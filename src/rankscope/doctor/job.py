"""What a job needs of this host before it can be traced there: one condition, one line.

Asked are the interpreter that ranks will run (really started, with RANKSCOPE set), the job itself
(ranks, settings, trace folder, collector), the disk of the spools, and the kernel.
"""

from __future__ import annotations

import enum
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rankscope
from rankscope.agent.identity import identify, launcher_place
from rankscope.capture.device.fusedcache import COMPILER, missing_variants
from rankscope.capture.kernel import build as build_kernel
from rankscope.capture.kernel import is_off, why_none
from rankscope.companion.curve import handshake_trouble
from rankscope.errors import KeysError, RankscopeError
from rankscope.record.ranks import MAX_RANKS
from rankscope.record.texts import OLDEST_TORCH, is_older, untested_warning
from rankscope.run.connection import is_tcp
from rankscope.run.files import mount_of
from rankscope.run.folders import (
    check_free_space,
    host_run_folder,
    remove_run_folder,
    run_key,
    spool_base,
)
from rankscope.run.prepare import (
    Collection,
    default_out,
    free_out,
    missing_folders,
    named_out,
    prepare_out,
    remove_empty,
)
from rankscope.settings import Settings, as_variables, is_enabled, misspelt_variables, settings_from


class Status(enum.Enum):
    """How a condition stands."""

    OK = "ok"
    NOTE = "note"
    """Tracing works; there is something to know."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """Cannot be asked as long as another one fails."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One line of the answer."""

    name: str
    status: Status
    answer: str
    remedy: str = ""

    @classmethod
    def ok(cls, name: str, answer: str) -> Condition:
        """Return a condition that holds."""
        return cls(name, Status.OK, answer)

    @classmethod
    def note(cls, name: str, answer: str, remedy: str) -> Condition:
        """Return one that holds, with something to know."""
        return cls(name, Status.NOTE, answer, remedy)

    @classmethod
    def failed(cls, name: str, answer: str, remedy: str) -> Condition:
        """Return one that does not hold, with what to do."""
        return cls(name, Status.FAILED, answer, remedy)

    @classmethod
    def skipped(cls, name: str, because_of: str) -> Condition:
        """Return one that cannot be asked because another fails."""
        return cls(name, Status.SKIPPED, f"cannot be asked: see {because_of!r}")


_LIMIT_S = 300.0
_MARK = "rankscope-doctor:"
_PROBE = f"""
import json, os, site, sys
has_run = "rankscope_launcher.startup" in sys.modules
user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
folders = dict.fromkeys([*site.getsitepackages(), *user])
files = [os.path.join(f, n) for f in folders for n in ("rankscope.pth", "rankscope.start")]
found = dict(
    executable=sys.executable, version=list(sys.version_info[:3]), has_run=has_run,
    isolated=sys.flags.isolated, no_site=sys.flags.no_site, sites=list(folders),
    start_files=[f for f in files if os.path.exists(f)],
)
try:
    import rankscope
    found["rankscope"] = os.path.dirname(os.path.realpath(rankscope.__file__))
except (ImportError, OSError) as error:
    found["no_rankscope"] = repr(error)
try:
    import torch
    found["torch"] = torch.__version__
except (ImportError, OSError, RuntimeError) as error:
    found["no_torch"] = repr(error)
try:
    from rankscope.capture.device.fusedforms import architectures
    found["gpus"] = architectures()
except (AttributeError, ImportError, OSError, RuntimeError):
    found["gpus"] = []
arming = sys.modules.get("rankscope.agent.activation")
found["is_armed"] = arming is not None and arming.current_session() is not None
print("\\n{_MARK}" + json.dumps(found))
"""
_NAMES = ("python", "rankscope", "torch", "GPU kernels", "start-up file", "start-up")


def interpreter_conditions(
    command: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Iterator[Condition]:
    """Ask an interpreter, and yield its conditions. `command`: how ranks call it, with options such
    as `-I`; settings of rankscope's in `environ` are left out."""
    called = shlex.join(command)
    answer, complaint = _ask(command, environ)
    if answer is None or answer["no_site"]:
        text, remedy = complaint, "name the interpreter of the ranks: --python"
        if answer is not None:
            text, remedy = f"{called} runs without site-packages (-S)", "start ranks without -S"
        yield Condition.failed("python", text, remedy)
        yield from (Condition.skipped(name, "python") for name in _NAMES[1:])
        return
    version = ".".join(map(str, answer["version"]))
    isolated = ", isolated (-I)" if answer["isolated"] else ""
    yield Condition.ok("python", f"{answer['executable']} {version}{isolated}")
    yield _rankscope(answer)
    torch = _torch(answer)
    yield torch
    yield _gpu_kernels(command, answer["gpus"])
    yield from _start_up(answer, complaint, torch.status is not Status.FAILED)


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    """Return what the interpreter says, and what it wrote to stderr."""
    variables = {k: v for k, v in environ.items() if not k.startswith("RANKSCOPE_")}
    try:
        done = _run([*command, "-c", _PROBE], {**variables, "RANKSCOPE": "1"})
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{shlex.join(command)} cannot be run: {error}"
    last_words = " ".join(done.stderr.split()[-40:])
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        ending = f"ended with {done.returncode}: {last_words or 'no word'}"
        return None, f"{shlex.join(command)} {ending}"
    return json.loads(answers[-1].removeprefix(_MARK)), last_words


def _run(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT_S,
        check=False,
    )


def _rankscope(answer: Mapping[str, Any]) -> Condition:
    own_path = str(Path(rankscope.__file__).resolve().parent)
    imported = answer.get("rankscope")
    if imported is None:
        return Condition.failed(
            "rankscope",
            f"that interpreter cannot import it: {answer['no_rankscope']}",
            f"{answer['executable']} -m pip install rankscope, or name another with --python",
        )
    if imported != own_path:
        return Condition.failed(
            "rankscope",
            f"ranks would import {imported}, this command is {own_path}",
            "take one of them off PYTHONPATH, or out of the folder you start from",
        )
    return Condition.ok("rankscope", imported)


def _torch(answer: Mapping[str, Any]) -> Condition:
    remedy = f"install torch {OLDEST_TORCH} or newer"
    if "torch" not in answer:
        return Condition.failed("torch", f"cannot be imported: {answer['no_torch']}", remedy)
    if is_older(answer["torch"], OLDEST_TORCH):
        return Condition.failed("torch", f"{answer['torch']} is too old", remedy)
    if doubt := untested_warning(answer["torch"]):
        return Condition.note("torch", doubt, "look for a newer rankscope; or try: --script")
    return Condition.ok("torch", answer["torch"])


def _gpu_kernels(command: Sequence[str], architectures: Sequence[str]) -> Condition:
    """Say what takes the digests on GPUs; compiles their kernels where that is still to be done."""
    if not architectures:
        return Condition.ok("GPU kernels", "torch has no GPU to use here")
    for architecture in architectures:
        if missing_variants(architecture):
            try:
                done = _run([*command, "-m", COMPILER, architecture])
                reason = (done.stderr.strip() or "no word").splitlines()[-1]
            except (OSError, subprocess.SubprocessError) as error:
                reason = str(error)
        if missing_variants(architecture):
            return Condition.note(
                "GPU kernels",
                f"{reason}: torch operations take the digests that need them, with the same "
                f"numbers and many times the launches",
                "install triton 3.4 to 3.9 (torch for GPUs brings one), unset RANKSCOPE_KERNEL",
            )
    return Condition.ok("GPU kernels", f"compiled for {', '.join(architectures)}")


def _start_up(
    answer: Mapping[str, Any], complaint: str, torch_is_fine: bool
) -> Iterator[Condition]:
    if "rankscope" not in answer:
        yield Condition.skipped("start-up file", "rankscope")
        yield Condition.skipped("start-up", "rankscope")
        return
    if not answer["start_files"]:
        yield Condition.failed(
            "start-up file",
            f"no rankscope.pth in {', '.join(answer['sites']) or 'any site-packages'}",
            "pip install rankscope into that environment (copies on PYTHONPATH or by --target "
            "have none), or call rankscope.attach() in the script",
        )
        yield Condition.skipped("start-up", "start-up file")
        return
    yield Condition.ok("start-up file", ", ".join(answer["start_files"]))
    if not answer["has_run"]:
        yield Condition.failed(
            "start-up",
            f"the file is there, but did nothing with RANKSCOPE=1: {complaint or 'no word'}",
            "install rankscope once more; a .pth file of another package may stand in the way",
        )
    elif not torch_is_fine:
        yield Condition.skipped("start-up", "torch")
    elif not answer["is_armed"]:
        yield Condition.failed(
            "start-up",
            f"importing torch did not arm it: {complaint or 'no word'}",
            "a sitecustomize or an import hook may have taken ours off; call rankscope.attach()",
        )
    else:
        yield Condition.ok(
            "start-up", "fires: a child with RANKSCOPE=1 was armed by importing torch"
        )


_CONNECT_S = 3.0
_SPOOL_NAMES = ("spool folder", "spool disk", "spool space")
_ON_SETTINGS = (*_SPOOL_NAMES, "trace folder", "collector")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is going to be run here."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """{field: text} of settings that are given; the rest comes from variables and defaults."""
    local_ranks: int | None = None
    """Ranks of this host; None for what a launcher's variables say, else 1."""
    hosts: int = 1
    python: tuple[str, ...] = (sys.executable,)


def examine(question: Question) -> Iterator[Condition]:
    """Yield every condition as soon as it is known."""
    yield from interpreter_conditions(question.python)
    yield from job_conditions(question)


def job_conditions(
    question: Question, environ: Mapping[str, str] = os.environ
) -> Iterator[Condition]:
    """Yield those that do not ask the ranks' interpreter."""
    placement = launcher_place(environ)
    local_ranks = question.local_ranks or (placement and placement.local_world_size) or 1
    world_size = local_ranks * question.hosts
    if question.local_ranks is None and placement is not None:
        world_size = max(world_size, placement.world_size)
    yield _ranks(environ)
    yield _variables(environ)
    settings, condition = _read_settings(question.settings, world_size, environ)
    yield condition
    if settings is None:
        yield from (Condition.skipped(name, "settings") for name in _ON_SETTINGS)
    else:
        yield from spool_conditions(settings, min(local_ranks, settings.traced_of(world_size)))
        yield _trace_folder(settings, question.hosts)
        yield _collector(settings)
    yield kernel()


def _ranks(environ: Mapping[str, str]) -> Condition:
    """Say whom a rank started with these variables would take itself for."""
    rank, world = environ.get("RANK"), environ.get("WORLD_SIZE")
    if (rank is None) != (world is None):
        present, missing = ("RANK", "WORLD_SIZE") if world is None else ("WORLD_SIZE", "RANK")
        return Condition.failed(
            "ranks",
            f"{present}={environ[present]} without {missing}",
            f"set both, or unset {present}: a launcher sets them for each rank",
        )
    is_rank = (rank or "0").isdecimal() and (world or "1").isdecimal()
    if not is_rank or not int(rank or 0) < int(world or 1) < MAX_RANKS:
        return Condition.failed(
            "ranks",
            f"RANK={rank} of WORLD_SIZE={world} is not a rank",
            "unset both here: a launcher sets them for each rank",
        )
    placement = launcher_place(environ)
    if placement is None:
        return Condition.ok("ranks", "no launcher's variables here: alone, rank 0 of 1")
    me = identify(None, environ)
    return Condition.ok(
        "ranks",
        f"{next(iter(placement.variables))}: rank {me.rank} of {me.world_size}, "
        f"local rank {me.local_rank} of {me.local_world_size}",
    )


def _variables(environ: Mapping[str, str]) -> Condition:
    """Say which variables begin like ours and mean nothing."""
    if wrong := misspelt_variables(environ):
        return Condition.failed("variables", wrong, "rename it or unset it; it has no effect")
    named = sorted(name for name in environ if name.startswith("RANKSCOPE"))
    return Condition.ok("variables", ", ".join(named) or "none of RANKSCOPE's is set")


def _read_settings(
    texts: Mapping[str, str], world_size: int, environ: Mapping[str, str]
) -> tuple[Settings | None, Condition]:
    """Read the settings as a rank would; None where they cannot be read."""
    try:
        settings = settings_from(texts, environ)
    except RankscopeError as error:
        return None, Condition.failed(
            "settings", as_variables(str(error)), "correct it; ranks would train untraced"
        )
    if not settings.traced_of(world_size):
        return None, Condition.failed(
            "settings",
            f"ranks selects none of the {world_size} ranks of this job",
            "give other --ranks, or the size of the job with --nproc-per-node and --nnodes",
        )
    asks = "" if is_enabled(environ) else "; RANKSCOPE is not set: only `rankscope run` traces"
    traced = f"{settings.traced_of(world_size)} of {world_size} ranks"
    return settings, Condition.ok("settings", f"steps {settings.steps.text}, {traced}{asks}")


def _trace_folder(settings: Settings, hosts: int) -> Condition:
    """Say whether the trace folder can be made; it is, with its parents, and removed again."""
    if Collection.of_setting(settings.collector).is_elsewhere:
        return Condition.ok("trace folder", f"the collector at {settings.collector} has its own")
    if hosts > 1 and settings.out is None:
        return Condition.failed(
            "trace folder",
            f"{hosts} hosts and no folder that all of them see",
            "give --out on a shared disk, the same on every host",
        )
    asked = named_out(settings.out or default_out(), "RUN")
    out = free_out(asked, is_shared=hosts > 1)
    new_folders = missing_folders(out)
    try:
        prepare_out(out, "--out")
        (out / "sample").touch()
        (out / "sample").unlink()
    except (RankscopeError, OSError) as error:
        return Condition.failed("trace folder", str(error), "give another with --out")
    finally:
        remove_empty(new_folders)
    mount = mount_of(out)
    text = f"{out}{f' ({mount.kind})' if mount else ''}"
    text += f", because {asked} is not empty" if out != asked else ""
    if hosts > 1 and (mount is None or mount.is_local):
        return Condition.note(
            "trace folder",
            f"{text} looks like this host's own disk",
            "the other hosts must see it: give --out on a shared disk",
        )
    return Condition.ok("trace folder", text)


def _collector(settings: Settings) -> Condition:
    address = settings.collector
    collection = Collection.of_setting(address)
    keyed = " --keys FILE" if is_tcp(address) else ""
    remedy = f"start it: rankscope collect --bind {address}{keyed} --world-size N --out DIR"
    try:
        keys = collection.check(settings.keys)
    except KeysError as error:
        return Condition.failed("collector", as_variables(str(error)), "give other --keys")
    except RankscopeError as error:
        return Condition.failed("collector", as_variables(str(error)), "give another --collector")
    if not collection.is_elsewhere:
        return Condition.ok("collector", address or "started with the job")
    try:
        _connect(address)
    except OSError as error:
        return Condition.failed(
            "collector", f"{address} does not answer: {error.strerror or error}", remedy
        )
    trouble = "" if keys is None else handshake_trouble(address, keys, _CONNECT_S)
    if trouble:
        return Condition.failed("collector", trouble, "give both sides the same --keys")
    suffix = "" if keys is None else ", and knows these keys"
    return Condition.ok("collector", f"{address} answers{suffix}")


def _connect(address: str) -> None:
    if address.startswith("ipc://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(_CONNECT_S)
            caller.connect(str(Path(address.removeprefix("ipc://"))))
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal():
        raise OSError(f"port {port!r} cannot be called")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


def spool_conditions(settings: Settings, local_ranks: int) -> Iterator[Condition]:
    """Yield whether ranks can write their records here, in a folder that is made and removed."""
    base = spool_base(settings.spool)
    try:
        folder = host_run_folder(base, run_key(f"doctor {os.getpid()} {time.time_ns()}"))
    except RankscopeError as error:
        yield Condition.failed("spool folder", error.problem, "give a local folder with --spool")
        yield from (Condition.skipped(name, "spool folder") for name in _SPOOL_NAMES[1:])
        return
    try:
        yield Condition.ok("spool folder", str(base))
        yield _local(base)
        yield _space(folder, settings.spool_bytes, local_ranks)
    finally:
        remove_run_folder(folder)


def _local(base: Path) -> Condition:
    mount = mount_of(base)
    if mount is None:
        return Condition.note(
            "spool disk", f"{base}: /proc/mounts does not say", "take a local disk"
        )
    text = f"{mount.kind} at {mount.point}"
    if not mount.is_local:
        return Condition.failed(
            "spool disk",
            f"{text} is not this host's own: a mapped file there can stall or end a rank",
            "give a local disk with --spool",
        )
    return Condition.ok("spool disk", text)


def _space(folder: Path, spool_bytes: int, ranks: int) -> Condition:
    needed = f"{ranks} x {spool_bytes >> 20} MiB"
    try:
        check_free_space(folder, spool_bytes * ranks)
    except RankscopeError as error:
        return Condition.failed(
            "spool space",
            f"{error.problem} ({needed})",
            "give a larger disk with --spool, or less with --spool-bytes",
        )
    return Condition.ok(
        "spool space", f"{needed} fit, {shutil.disk_usage(folder).free >> 20} MiB free"
    )


def kernel() -> Condition:
    """Say what takes the digests on CPU; compiles the kernel where that has not been done yet."""
    if (path := build_kernel()) is not None:
        return Condition.ok("kernel", str(path))
    return Condition.note(
        "kernel",
        f"{why_none()}: numpy takes the digests, about three times slower, with the same numbers",
        "unset RANKSCOPE_KERNEL"
        if is_off()
        else "install gcc or clang, set CC, or name an executable cache by XDG_CACHE_HOME",
    )
