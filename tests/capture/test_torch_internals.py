"""Private names of torch: each is there, or known to be gone. And a torch without one loses what
rests on the name, and nothing else.

For the second, each case runs in a fork made before rankscope is imported, with the name taken out
of torch.
"""

from __future__ import annotations

import importlib
import json
import re
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
    "torch.float4_e2m1fn_x2",
]
"""Private names torch itself can do without in the program below."""

_C10D, _STAGE = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.pipelining.stage.PipelineStage",
)
_HOOKS, _SCHEDULES = "torch.nn.modules.module", "torch.distributed.pipelining.schedules"
RESTS_ON = [
    *NAMES,
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch._guards._TLS",
    "torch.nn.Module._compiled_call_impl",
    "torch._dynamo.eval_frame._stance",
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch._C.DispatchKeySet.raw_repr",
    *(f"{_C10D}._world.{name}" for name in ("pg_names", "pg_group_ranks", "pg_map")),
    "torch._C._distributed_c10d._resolve_process_group",
    "torch._C._distributed_c10d.ProcessGroup._get_backend",
    "torch._C._distributed_c10d.Backend._get_sequence_number_for_group",
    "torch._C._distributed_c10d.Work",
    "torch._C.Future",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    *(f"{_HOOKS}._global_forward_{end}" for end in ("pre_hooks", "hooks")),
    *(f"{_HOOKS}._global_forward_hooks_{end}" for end in ("always_called", "with_kwargs")),
    *(f"{_HOOKS}._global_backward_{end}" for end in ("pre_hooks", "hooks")),
    f"{_HOOKS}._has_any_global_hook",
    f"{_STAGE}._shape_inference",
    f"{_STAGE}._forward_metadata_inference",
    f"{_STAGE}._backward_metadata_inference",
    *(f"{_SCHEDULES}.PipelineSchedule{kind}.step" for kind in ("Single", "Multi")),
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._flat_param.FlatParamHandle.uses_sharded_strategy",
    "torch._tensor_str.PRINT_OPTS",
]
SINCE = {
    "torch.fx._symbolic_trace._is_fx_tracing_tls": (2, 14),
    f"{_STAGE}._forward_metadata_inference": (2, 12),
    f"{_STAGE}._backward_metadata_inference": (2, 12),
}
"""The first version that has a name, where 2.8 has it not."""
UNTIL = {
    "torch.fx._symbolic_trace._is_fx_tracing_flag": (2, 14),  # `_is_fx_tracing_tls`
    f"{_STAGE}._shape_inference": (2, 12),  # `_forward_metadata_inference` and its like
}
"""The first version that has it no more, beside what is read in its place."""


def is_there(name: str) -> bool:
    """Import as much of a dotted name as is a module, and look the rest up."""
    parts, value = name.split("."), torch
    for number, part in enumerate(parts[1:], 2):
        try:
            value = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
    return True


@pytest.mark.parametrize("name", RESTS_ON)
def test_a_private_name_that_something_rests_on_is_there(name: str) -> None:
    """Where this fails, torch has moved a name: find what stands in its place."""
    since, until = SINCE.get(name, (0,)), UNTIL.get(name, (99,))
    assert is_there(name) == (torch.__version__ >= since and torch.__version__ < until)


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


def torch_needs(name: str, said: str) -> bool:
    """True where the program ended because a line of torch, not of ours, asked for the name.

    2.15 asks for `_is_tracing` in each call of a module, up to 2.10 an operator for the pytrees.
    """
    *_, last = ["", *re.findall(r'^  File "(.*?)", line', said, re.MULTILINE)]
    missing = rf"^(AttributeError|NameError): .*'{name.rpartition('.')[2]}'"
    return "/torch/" in last and re.search(missing, said, re.MULTILINE) is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_whole_in_a_torch_without(name: str, outcomes: Any) -> None:
    if outcomes[name][0] == 77:
        pytest.skip(f"this torch has no {name}")
    if torch_needs(name, outcomes[name][1]):
        pytest.skip(f"torch {torch.__version__} itself does not run without {name}")
    whole, without = read(outcomes[""]), read(outcomes[name])
    assert whole["complete"] and not whole["errors"]
    assert without == whole
