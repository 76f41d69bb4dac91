"""The interpreter that ranks will run: really started, with RANKSCOPE set, and asked."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rankscope
from rankscope.capture.device.fusedcache import COMPILER, missing_variants
from rankscope.doctor.condition import Condition, Status
from rankscope.record.texts import OLDEST_TORCH, is_older, untested_warning

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
except (ImportError, OSError, RuntimeError):
    found["gpus"] = []
arming = sys.modules.get("rankscope.agent.activation")
found["is_armed"] = arming is not None and arming.current_session() is not None
print("\\n{_MARK}" + json.dumps(found))
"""
_NAMES = ("python", "rankscope", "torch", "GPU kernels", "start-up file", "start-up")


def interpreter_conditions(
    command: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Iterator[Condition]:
    """Yield what an interpreter says of itself. `command`: how ranks call it, with options such as
    `-I`; settings of rankscope's in `environ` are left out."""
    called = shlex.join(command)
    found, complaint = _ask(command, environ)
    if found is None or found["no_site"]:
        text, remedy = complaint, "name the interpreter of the ranks: --python"
        if found is not None:
            text, remedy = f"{called} runs without site-packages (-S)", "start ranks without -S"
        yield Condition.failed("python", text, remedy)
        yield from (Condition.skipped(name, "python") for name in _NAMES[1:])
        return
    version = ".".join(map(str, found["version"]))
    isolated = ", isolated (-I)" if found["isolated"] else ""
    yield Condition.ok("python", f"{found['executable']} {version}{isolated}")
    yield _rankscope(found)
    torch = _torch(found)
    yield torch
    yield _gpu_kernels(command, found["gpus"])
    yield from _start_up(found, complaint, torch.status is not Status.FAILED)


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    """Return what the interpreter says, and what it wrote to stderr."""
    kept = {k: v for k, v in environ.items() if not k.startswith("RANKSCOPE_")}
    try:
        done = _run([*command, "-c", _PROBE], {**kept, "RANKSCOPE": "1"})
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{shlex.join(command)} cannot be run: {error}"
    last_words = " ".join(done.stderr.split()[-40:])
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        how = f"ended with {done.returncode}: {last_words or 'no word'}"
        return None, f"{shlex.join(command)} {how}"
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


def _rankscope(found: Mapping[str, Any]) -> Condition:
    ours = str(Path(rankscope.__file__).resolve().parent)
    theirs = found.get("rankscope")
    if theirs is None:
        return Condition.failed(
            "rankscope",
            f"that interpreter cannot import it: {found['no_rankscope']}",
            f"{found['executable']} -m pip install rankscope, or name another with --python",
        )
    if theirs != ours:
        return Condition.failed(
            "rankscope",
            f"ranks would import {theirs}, this command is {ours}",
            "take one of them off PYTHONPATH, or out of the folder you start from",
        )
    return Condition.ok("rankscope", theirs)


def _torch(found: Mapping[str, Any]) -> Condition:
    remedy = f"install torch {OLDEST_TORCH} or newer"
    if "torch" not in found:
        return Condition.failed("torch", f"cannot be imported: {found['no_torch']}", remedy)
    if is_older(found["torch"], OLDEST_TORCH):
        return Condition.failed("torch", f"{found['torch']} is too old", remedy)
    if doubt := untested_warning(found["torch"]):
        return Condition.note("torch", doubt, "look for a newer rankscope; or try: --script")
    return Condition.ok("torch", found["torch"])


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


def _start_up(found: Mapping[str, Any], complaint: str, torch_is_fine: bool) -> Iterator[Condition]:
    if "rankscope" not in found:
        yield Condition.skipped("start-up file", "rankscope")
        yield Condition.skipped("start-up", "rankscope")
        return
    if not found["start_files"]:
        yield Condition.failed(
            "start-up file",
            f"no rankscope.pth in {', '.join(found['sites']) or 'any site-packages'}",
            "pip install rankscope into that environment (copies on PYTHONPATH or by --target "
            "have none), or call rankscope.attach() in the script",
        )
        yield Condition.skipped("start-up", "start-up file")
        return
    yield Condition.ok("start-up file", ", ".join(found["start_files"]))
    if not found["has_run"]:
        yield Condition.failed(
            "start-up",
            f"the file is there, but did nothing with RANKSCOPE=1: {complaint or 'no word'}",
            "install rankscope once more; a .pth file of another package may stand in the way",
        )
    elif not torch_is_fine:
        yield Condition.skipped("start-up", "torch")
    elif not found["is_armed"]:
        yield Condition.failed(
            "start-up",
            f"importing torch did not arm it: {complaint or 'no word'}",
            "a sitecustomize or an import hook may have taken ours off; call rankscope.attach()",
        )
    else:
        yield Condition.ok(
            "start-up", "fires: a child with RANKSCOPE=1 was armed by importing torch"
        )
