"""A long job in miniature: `python long_run.py STEPS SAMPLES`, one JSON line per sample on stdout.

Everything that jobs make anew while they run is made anew here: a loss each step, a module with
parameters every few steps, an optimizer every few hundred, a validation loop now and then.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import sys
import time
import weakref
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

PROBE_EVERY, OPTIMIZER_EVERY, VALIDATE_EVERY = 5, 30, 40


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def run(steps: int, samples: int) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(8, 16), torch.randint(0, 3, (8,))
    begin = time.perf_counter()
    for step in range(steps):
        if step % OPTIMIZER_EVERY == 1:
            optimizer = torch.optim.Adam(model.parameters())
        if step % VALIDATE_EVERY == 2:
            with torch.no_grad():
                model(x)
        loss = nn.CrossEntropyLoss()(model(x), y)
        if step % PROBE_EVERY == 0:  # a module of its own, as probes and adapters make them
            loss = loss + nn.Linear(16, 1)(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % (steps // samples) == steps // samples - 1:
            print(json.dumps({"step": step} | sample(model, time.perf_counter() - begin)))
            begin = time.perf_counter()


def sample(model: nn.Module, seconds: float) -> dict[str, object]:
    """Count whatever could grow: memory, objects, descriptors, threads, hooks, tables."""
    gc.collect()
    objects = gc.get_objects()
    ours = collections.Counter(type(one).__qualname__ for one in objects if _is_ours(one))
    tables = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
    weak = [one for one in objects if issubclass(type(one), tables)]
    return {
        "seconds": round(seconds, 3),
        "resident_kib": int(open("/proc/self/statm").read().split()[1]) * 4,
        "objects": len(objects),
        "ours": dict(ours),
        "entries": _entries(),
        "weak": sum(map(len, weak)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "spool_kib": _disk_kib("RANKSCOPE_SPOOL"),
        "out_kib": _disk_kib("RANKSCOPE_OUT"),
        "threads": len(os.listdir("/proc/self/task")),
        "module_hooks": sum(
            len(getattr(modules, name)) for name in dir(modules) if name.startswith("_global_")
            and hasattr(getattr(modules, name), "__len__")
        ),
        "optimizer_hooks": len(optimizers._global_optimizer_pre_hooks)
        + len(optimizers._global_optimizer_post_hooks),
        "own_hooks": sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
        ),
    }  # fmt: skip


def _disk_kib(variable: str) -> int:
    total = 0
    for path in Path(os.environ[variable]).rglob("*"):
        try:
            total += path.lstat().st_blocks // 2
        except FileNotFoundError:  # freed by the relay meanwhile
            continue
    return total


def _is_ours(one: object) -> bool:
    return str(type(one).__module__).startswith("rankscope")


def _entries() -> int:
    """Count what the containers hold that hang from our session."""
    arming = sys.modules.get("rankscope.agent.activation")
    session = arming.current_session() if arming is not None else None
    seen: set[int] = set()
    waiting: list[object] = [session] if session is not None else []
    total = 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, nn.Module, torch.Tensor)):
            continue
        if type(one).__qualname__ == "Segment":  # counted apart: they come and go with the relay
            continue
        seen.add(id(one))
        if isinstance(one, (dict, list, set, tuple, collections.deque)):
            total += len(one)
            waiting += one.values() if isinstance(one, dict) else one
        elif _is_ours(one):
            names = [n for k in type(one).__mro__ for n in getattr(k, "__slots__", ())]
            waiting += getattr(one, "__dict__", {}).values()
            waiting += [getattr(one, name, None) for name in names if isinstance(name, str)]
        elif isinstance(one, (weakref.WeakKeyDictionary, weakref.WeakSet)):
            total += len(one)
    return total


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
