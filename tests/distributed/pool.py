"""Real ranks for tests: processes that live on between tests, a fresh gloo group for every call.

    def gathers(value):                       # top level of the test module
        out = [None] * dist.get_world_size()
        dist.all_gather_object(out, value + dist.get_rank())
        return out

    def test_all_ranks_see_all_values(ranks):
        assert ranks.run(gathers, 10, world_size=3) == [[10, 11, 12]] * 3

A rank sees the variables torchrun would set. What a rank prints goes to its log, whose tail is part
of the error when a call fails. A rank that dies or does not come back is replaced before the next
call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests import forked

GRACE_S = 3.0
"""How long the other ranks get once one has failed."""


class RankFailure(AssertionError):
    """A call that failed on some ranks: their tracebacks, and what they printed."""


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    channel: Connection
    log: Path
    log_start: int = 0

    def stop(self) -> None:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def show_stacks(self) -> None:
        """Have every thread's stack written to the log."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)

    def printed(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return log.read()[-4000:].decode(errors="replace").strip()


class RankPool:
    """Up to `size` rank processes, started when first needed."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._ranks: list[_Rank] = []
        self._used: list[_Rank] = []
        """By the last call."""
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 4,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
        group_timeout_s: float = 300.0,
        fresh: bool = False,
    ) -> list[Any]:
        """Call `fn(*args)` on `world_size` ranks and return what each returned, by rank.

        `fn` is a top-level function of any file; arguments and results are pickled. `env` is set
        during the call only. `group_timeout_s` is how long a collective waits for a rank that never
        comes: less where one is made not to come. `fresh` starts new processes first, for what
        happens at the start of a process.

        Raises:
            RankFailure: a rank raised, died, or did not come back in time.
        """
        if fresh:
            self.close_ranks()
        self._start(world_size)
        self._calls += 1
        self._used = used = self._ranks[:world_size]
        store = Path(self._folder.name) / f"store-{self._calls}"
        call = (
            fn.__module__,
            inspect.getfile(fn),
            fn.__qualname__,
            args,
            dict(env or {}),
            str(store),
            group_timeout_s,
        )
        for number, rank in enumerate(used):
            rank.log_start = rank.log.stat().st_size
            rank.channel.send_bytes(pickle.dumps((number, world_size, *call)))
        answers = self._collect(used, timeout_s)
        store.unlink(missing_ok=True)
        failures = [
            f"--- rank {number}: {answer[1]}\n{used[number].printed()}"
            for number, answer in sorted(answers.items())
            if not answer[0]
        ]
        for number in sorted(answers, reverse=True):
            if answers[number][0] is None:
                used[number].stop()
                self._ranks.remove(used[number])
        if failures:
            raise RankFailure(f"{fn.__qualname__} failed\n" + "\n".join(failures))
        return [answers[number][1] for number in range(world_size)]

    def kill_ranks(self) -> None:
        """End a `run` that another thread waits for: its ranks die, and it raises."""
        for rank in self._used:
            rank.process.kill()

    def _collect(self, used: list[_Rank], timeout_s: float) -> dict[int, tuple[bool | None, Any]]:
        """Return {rank: (True, result) | (False, traceback) | (None, how it went missing)}."""
        answers: dict[int, tuple[bool | None, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(used):
            waiting = {rank.channel: n for n, rank in enumerate(used) if n not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for channel in ready:
                number = waiting[channel]  # type: ignore[index]
                try:
                    answers[number] = pickle.loads(channel.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    answers[number] = (None, f"died with exit code {used[number].process.wait()}")
                if not answers[number][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready:
                for number in waiting.values():
                    used[number].show_stacks()
                    answers[number] = (None, "did not come back, and was killed")
        return answers

    def _start(self, count: int) -> None:
        """Have so many ranks that can take a call: a collective waits for no import."""
        started: list[_Rank] = []
        if count > self._size:
            raise ValueError(f"world_size={count}, but the pool has {self._size} ranks at most")
        while len(self._ranks) < count:
            ours, theirs = Pipe()
            log = Path(self._folder.name) / f"log-{time.monotonic_ns()}"
            with log.open("wb") as output:
                process = forked.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env={k: v for k, v in os.environ.items() if not k.startswith("RANKSCOPE")},
                )
            theirs.close()
            self._ranks.append(_Rank(process, ours, log))
            started.append(self._ranks[-1])
        for rank in started:
            with contextlib.suppress(EOFError):  # it died: the call says so
                rank.channel.recv_bytes()

    def close_ranks(self) -> None:
        """End every rank; the next call starts new ones."""
        for rank in self._ranks:
            rank.stop()
        self._ranks.clear()

    def close(self) -> None:
        """End every rank for good."""
        self.close_ranks()
        self._folder.cleanup()


# ---- what follows runs in the ranks -------------------------------------------------------------


def _function(module_name: str, file: str, qualname: str) -> Callable[..., Any]:
    """Load the test's module from its file under its own name: pickles mean the same here."""
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _group(rank: int, world_size: int, store: str, timeout_s: float) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
        gc.collect()  # a group in a cycle keeps a thread that wakes a hundred times a second
        _freeze_what_was_imported()


def _forget_meshes() -> None:
    """Empty DTensor's caches. To them meshes are equal that have the same ranks and axes, so what
    they give back may carry the mesh of an earlier call, whose process groups are gone: torch then
    finds no group of that name, or finds another one and waits for ever.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    import torch
    from torch.distributed.tensor import _redistribute

    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    for cache in [*_frozen_caches, *_caches()]:
        cache.cache_clear()


def _caches() -> list[Any]:
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), functools._lru_cache_wrapper)
        and str(getattr(each, "__module__", "")).startswith("torch.distributed")
    ]


_frozen_caches: list[Any] = []
"""torch's caches among what is frozen: `gc.get_objects` leaves them out."""
_frozen_modules = 0
"""How many modules were imported when objects were last frozen."""


def _freeze_what_was_imported() -> None:
    """Take the objects of new modules out of the garbage collector's way, and keep their caches.

    Each call ends with a collection, which would walk them all. Called where no group is left, for
    what is frozen is never collected.
    """
    global _frozen_modules
    if len(sys.modules) == _frozen_modules:
        return
    if not _frozen_modules:
        gc.unfreeze()  # what the fork server froze has caches too
    _frozen_caches.extend(_caches())
    gc.freeze()
    _frozen_modules = len(sys.modules)


def _serve(channel: Connection) -> None:
    import torch

    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    _freeze_what_was_imported()
    channel.send_bytes(b"ready")
    while True:
        try:
            message = channel.recv_bytes()
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            rank, world_size, *call, store, timeout_s = pickle.loads(message)
            module, file, qualname, args, env = call
            torchrun = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_WORLD_SIZE": world_size,
                "GROUP_RANK": 0,
                "TORCHELASTIC_RESTART_COUNT": 0,
                # a rank that is through with its call must not leave while others still connect
                "TORCH_DIST_INIT_BARRIER": 1,
            }
            variables = {**{k: str(v) for k, v in torchrun.items()}, **env}
            with _environment(variables), _group(rank, world_size, store, timeout_s):
                answer = (True, _function(module, file, qualname)(*args))
                payload = pickle.dumps(answer)
        except BaseException:
            payload = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send_bytes(payload)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
