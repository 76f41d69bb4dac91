"""Runs somebody's script and writes down what it computes, until it has made a few optimizer steps.

    python -m rankscope.doctor.scriptprobe FOLDER STEPS SEED SCRIPT ARGUMENTS...

The same file runs in the untraced and in the traced runs, so what it does itself is on both sides.
It uses nothing of rankscope's way of tracing. Every rank writes `FOLDER/rank<R>.json`:

    {"values": [[name, hash], ...],   in the order in which the script computed them
     "losses": {name: number},
     "steps": 3, "ended": "stopped" | "came to its end" | "<exception>"}
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import runpy
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import rankscope


class _ScriptProbe:
    def __init__(self, folder: Path, steps: int) -> None:
        self._path = folder / f"rank{os.environ.get('RANK', '0')}.json"
        self._steps = steps
        self._values: list[tuple[str, str]] = []
        self._losses: dict[str, float] = {}
        self._done: Counter[int] = Counter()
        """Steps of each optimizer, by the order in which they first stepped."""
        self._optimizers: list[torch.optim.Optimizer] = []
        self._names: dict[int, str] = {}
        """Of parameters, by identity."""
        self._backward = torch.autograd.backward
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def install(self) -> None:
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._backward_from

    def end(self, ending: str) -> None:
        """Write down what there is; the first call counts."""
        with self._lock:
            # a forked worker of a loader has this probe too, and would write half a report under
            # its rank's name
            if self._pid != os.getpid() or self._path.exists():
                return
            self._note("random numbers at the end", _random_state())
            report = {
                "values": self._values,
                "losses": self._losses,
                "steps": max(self._done.values(), default=0),
                "ended": ending,
            }
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(report))
            draft.rename(self._path)

    def _backward_from(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        step = max(self._done.values(), default=0)
        for tensor in [tensors] if isinstance(tensors, Tensor) else [*tensors]:
            number = sum(name.startswith(f"loss of step {step},") for name in self._losses)
            name = f"loss of step {step}, backward {number}"
            self._note(name, _hash(tensor))
            is_one = tensor.numel() == 1 and not tensor.is_meta
            self._losses[name] = float(tensor.detach()) if is_one else float("nan")
        return self._backward(tensors, *args, **kwargs)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End the run before one step too many: all optimizers are done, no rank is inside a
        step."""
        if self._pid == os.getpid() and self._done[self._number_of(optimizer)] >= self._steps:
            self.end("stopped")
            _leave()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        number = self._number_of(optimizer)
        step = self._done[number]
        where = f"step {step}" + (f", optimizer {number}" if number else "")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._name_of(parameter)
                if parameter.grad is not None:
                    self._note(f"gradient of {name} in {where}", _hash(parameter.grad))
                self._note(f"parameter {name} after {where}", _hash(parameter))
        self._note(f"random numbers after {where}", _random_state())
        self._done[number] += 1

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        for number, optimizer_seen in enumerate(self._optimizers):
            if optimizer_seen is optimizer:
                return number
        self._optimizers.append(optimizer)
        self._names.clear()  # its parameters may be new
        return len(self._optimizers) - 1

    def _name_of(self, parameter: Tensor) -> str:
        if id(parameter) not in self._names:
            # the type, not isinstance: that would ask `__class__` of every object alive, which
            # wakes lazy proxies of other packages
            for module in [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]:
                for name, module_parameter in module.named_parameters():
                    # every module around a parameter names it, the outermost by the longest name
                    if len(name) > len(self._names.get(id(module_parameter), "")):
                        self._names[id(module_parameter)] = name
            self._names.setdefault(id(parameter), f"without a name {tuple(parameter.shape)}")
        return self._names[id(parameter)]

    def _note(self, name: str, content: str) -> None:
        self._values.append((name, content))


def _hash(tensor: Tensor) -> str:
    """Return a hash of the bytes a rank holds of a tensor."""
    try:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        plain = local.detach()
        plain = plain.to_dense() if plain.layout is not torch.strided else plain
        data = plain.cpu().contiguous().reshape(-1)
        content = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    except (RuntimeError, TypeError, NotImplementedError) as error:  # a kind without plain bytes
        return f"not read: {type(error).__name__}"
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _random_state() -> str:
    """Return a hash of the state of all global generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        states += torch.cuda.get_rng_state_all()
    text = f"{[_hash(state) for state in states]} {np.random.get_state()!s} {random.getstate()}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _leave() -> NoReturn:
    """End this process here and now: nothing of the script that follows is run."""
    if (arming := sys.modules.get("rankscope.agent.activation")) is not None:
        arming.close()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # not SystemExit: the script might catch it and go on
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Run the script; leaves as the script does, or with code 0 where it was stopped."""
    folder, steps, seed, script = Path(arguments[0]), int(arguments[1]), arguments[2], arguments[3]
    if seed:
        torch.manual_seed(int(seed))
        np.random.seed(int(seed))
        random.seed(int(seed))
    rankscope.attach()  # where the variable asks for a trace, and no start-up file has done it
    probe = _ScriptProbe(folder, steps)
    probe.install()
    sys.argv = arguments[3:]
    # as Python does it for a script: its own modules come before installed ones
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        probe.end(_how_it_ended(sys.exc_info()[1]))


def _how_it_ended(error: BaseException | None) -> str:
    if isinstance(error, SystemExit):
        return f"ended with {error.code}" if error.code not in (None, 0) else "came to its end"
    return "came to its end" if error is None else f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    main(sys.argv[1:])
