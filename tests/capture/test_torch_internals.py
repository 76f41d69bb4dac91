"""A torch without one of the private names: what rests on the name is lost, and nothing else.

Each case runs in a fork made before rankscope is imported, with the name taken out of torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked

NAMES = [
    "torch._C._current_graph_task_id",
    "torch._C.DisableTorchFunction",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._dispatch_keys",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._is_functional_tensor",
    "torch._C._distributed_c10d._get_work_registry_size",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.utils._pytree.SUPPORTED_NODES",
    "torch.utils.checkpoint._StopRecomputationError",
    "torch.fx._symbolic_trace._is_fx_tracing_flag",
    "torch.fx._symbolic_trace._is_fx_tracing_tls",
    "torch._dynamo.utils.counters",
    "torch._C._is_tracing",
    "torch.float8_e8m0fnu",
    "torch.float4_e2m1fn_x2",
]
"""Private names torch itself can do without in the program below."""
NEEDED = {"torch._C._is_tracing": (2, 15)}
"""From which version on torch asks for one of them in every call of a module."""

_PROGRAM = r"""
import importlib, io, json, os, sys, traceback
import torch, torch._dynamo, torch._inductor, torch.distributed.tensor, torch.utils._pytree
from torch import nn

folder = sys.argv[1]
results = {}


def hide(name):
    holder, _, last = name.rpartition(".")
    parts = holder.split(".")
    found = sys.modules[parts[0]]
    for part in parts[1:]:
        found = getattr(found, part)
    if not hasattr(found, last):
        raise SystemExit(77)  # this torch has no such name
    delattr(found, last)


def traced(number):
    import rankscope

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = f"{folder}/{number}"
    with rankscope.trace(out=out) as handle:
        for _ in range(2):
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = handle.open()
    value = trace.value("2", "output")
    phases = sorted({node.phase.word for node in trace.find("*", step=1)})
    ranks = json.load(open(f"{out}/trace.json"))["completeness"]["ranks"]
    print(json.dumps({
        "loss": loss.item().hex(), "complete": trace.is_complete, "phases": phases,
        "hash": f"{value.per_rank[0].hash:x}",
        "errors": [error for rank in ranks for error in rank["errors"]],
    }))
    sys.stdout.flush()


for number, name in enumerate(["", *json.loads(sys.argv[2])]):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 1)
        code = 1
        try:
            if name:
                hide(name)
            traced(number)
            code = 0
        except SystemExit as leaving:
            code = leaving.code
        except BaseException:
            print(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    said = open(reading).read()
    _, status = os.waitpid(child, 0)
    results[name] = (os.waitstatus_to_exitcode(status), said)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    folder: Path = tmp_path_factory.mktemp("traces")
    ran = forked.run(
        [sys.executable, "-c", _PROGRAM, str(folder), json.dumps(NAMES)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found: dict[str, tuple[int, str]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def read(outcome: tuple[int, str]) -> dict[str, Any]:
    code, said = outcome
    assert code == 0, said
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_whole_in_a_torch_without(name: str, outcomes: Any) -> None:
    if outcomes[name][0] == 77:
        pytest.skip(f"this torch has no {name}")
    if name in NEEDED and torch.__version__ >= NEEDED[name]:
        assert f"has no attribute '{name.rpartition('.')[2]}'" in outcomes[name][1]
        return
    whole, without = read(outcomes[""]), read(outcomes[name])
    assert whole["complete"] and not whole["errors"]
    assert without == whole
