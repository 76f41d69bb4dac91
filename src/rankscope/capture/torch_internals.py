"""Every private name of torch that rankscope uses, each with what happens where it is missing.

torch's own tracing tools live off the same names; they change between releases. Nothing here raises
for a missing name: each function says what it then does.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

__all__ = [
    "async_collective_result",
    "collective_classes",
    "constant_while_tracing",
    "current_graph_task",
    "current_node",
    "default_groups",
    "default_store",
    "disable_torch_function",
    "dispatch_bits",
    "dtensor_parts",
    "dynamo_has_compiled",
    "forget_keyword_hook",
    "functional_operators",
    "global_hook_tables",
    "group_named",
    "group_ranks",
    "has_hook",
    "hide_from_compiled_modules",
    "hook_while_tracing",
    "is_async_collective",
    "is_being_captured",
    "is_collective_outstanding",
    "is_compiled_graph",
    "is_compiled_in_place",
    "is_compiling",
    "is_dtensor",
    "is_functorch_wrapper",
    "mesh_ranks",
    "next_node",
    "operation_guards",
    "optional_dtypes",
    "overrides_dispatch",
    "own_hook_tables",
    "placement_class",
    "registered_children",
    "run_compiled_eagerly",
    "shape_inference",
    "shard_order",
    "sharded_module_in_hand",
    "stops_recomputation",
    "unhook_after_tracing",
    "unseen_by_compiler",
]

_C: Any = torch._C


def optional_dtypes(*names: str) -> tuple[torch.dtype, ...]:
    """Return those of the named dtypes this torch has."""
    found = (getattr(torch, name, None) for name in names)
    return tuple(dtype for dtype in found if isinstance(dtype, torch.dtype))


# ---------------------------------------------------------------- autograd and compile

current_graph_task: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: -1)
"""Number of the backward pass running on this thread, -1 outside; without the name always -1."""

next_node: Callable[[], int] = getattr(
    getattr(_C, "_autograd", None), "_get_sequence_nr", lambda: 0
)
"""Number that the next node of this thread's autograd graph will have; without the name always 0,
and no backward call is found for what backward issues."""

_current_node: Callable[[], Any] = getattr(_C, "_current_autograd_node", lambda: None)


def current_node() -> tuple[int, torch.Tensor | None] | None:
    """Return the number of the node of the graph that backward is at on this thread, and the leaf
    whose gradient it accumulates; None outside. Without torch's names always None.
    """
    node = _current_node()
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else (int(number()), getattr(node, "variable", None))


is_compiling: Callable[[], bool] = torch.compiler.is_compiling
"""True while torch.compile traces (dynamo takes it for a constant)."""

_is_jit_tracing: Callable[[], bool] = getattr(_C, "_is_tracing", lambda: False)


_modules, _FX = sys.modules, "torch.fx._symbolic_trace"


def is_being_captured() -> bool:
    """True while `torch.jit.trace`, `torch.fx` or a compiler's backend runs a module to write down
    its operations.

    Reading a shape would be written down with them. Without jit's name that is what happens;
    without fx's flag its proxies are seen as arguments, without the compiler's context its run as a
    call.
    """
    if _is_jit_tracing() or getattr(_modules.get(_FX), "_is_fx_tracing_flag", False):
        return True
    if "torch._dynamo" not in _modules:  # asked at every call of a module: cheapest first
        return False
    compiler = getattr(_modules.get("torch._guards"), "_TLS", None)
    return getattr(compiler, "tracing_context", None) is not None


def has_hook(tensor: torch.Tensor, handle: torch.utils.hooks.RemovableHandle) -> bool:
    """True where a tensor hook was registered on this tensor: numbers of handles never recur.

    Without torch's table of hooks, False.
    """
    return handle.id in (getattr(tensor, "_backward_hooks", None) or ())


def is_compiled_graph(module: torch.nn.Module) -> bool:
    """True for what backends of torch.compile call in place of a model: its graph, with the
    parameters among the arguments.
    """
    return (
        isinstance(module, torch.fx.GraphModule)
        and dynamo_has_compiled()
        and next(module.parameters(), None) is None
    )


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """True after `module.compile()`: no hook sees its calls then. Without the name, never."""
    return getattr(module, "_compiled_call_impl", None) is not None


def dynamo_has_compiled() -> bool:
    """True where torch.compile has compiled a frame in this process, or does not count them."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    counters = getattr(dynamo, "counters", None)
    return counters is None or counters["frames"]["total"] > 0


def run_compiled_eagerly() -> Callable[[], None] | None:
    """Have everything compiled run as written, and return what ends that; None where torch cannot.

    Whatever stance the program had chosen comes back then, unless it chose another meanwhile.
    """
    choose = getattr(torch.compiler, "set_stance", None)  # torch 2.6 and newer
    if choose is None:
        return None
    stance = choose("force_eager")

    def restore() -> None:
        chosen = getattr(stance, "stance", None)
        if getattr(sys.modules["torch._dynamo.eval_frame"], "_stance", chosen) is chosen:
            stance.__exit__(None, None, None)

    return restore


def stops_recomputation(error: BaseException) -> bool:
    """True for what checkpointing raises when it has recomputed enough: not a fault.

    Without torch's class such a call reads as raised.
    """
    stop = _loaded("torch.utils.checkpoint", "_StopRecomputationError")
    return stop is not None and isinstance(error, stop)


def forget_keyword_hook(number: int) -> None:
    """Drop the note that a removed global forward hook takes keywords, which torch keeps for ever.

    Without the table there is nothing to drop.
    """
    taking_keywords = getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {})
    taking_keywords.pop(number, None)


HookTable = dict[int, Any]
_hooks: Any = torch.nn.modules.module
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks", "_global_forward_hooks",
    "_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs",
)  # fmt: skip
_BACKWARD_HOOKS = ("_global_backward_pre_hooks", "_global_backward_hooks")


def global_hook_tables() -> tuple[HookTable, HookTable, HookTable, HookTable] | None:
    """Return torch's tables of global forward hooks by number: pre-hooks, hooks, which of these are
    always called, and which take keywords.

    None where one is missing: hooks are then registered anew each time, and each time what was
    compiled is compiled again.
    """
    first, second, third, fourth = (getattr(_hooks, name, None) for name in _GLOBAL_HOOKS)
    if first is None or second is None or third is None or fourth is None:
        return None
    return first, second, third, fourth


def own_hook_tables(module: torch.nn.Module) -> tuple[HookTable, HookTable, HookTable] | None:
    """Return a module's own pre-hooks, which of them take keywords, and its forward hooks.

    None where the module lacks one: what its hooks replace is not seen then.
    """
    kept = vars(module)
    before, keywords = kept.get("_forward_pre_hooks"), kept.get("_forward_pre_hooks_with_kwargs")
    after = kept.get("_forward_hooks")
    return (
        None if before is None or keywords is None or after is None else (before, keywords, after)
    )


_ABOUT_GLOBAL_HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks"


def hide_from_compiled_modules(numbers: Set[int]) -> Callable[[], None]:
    """Keep a compiled module from warning of the global hooks with these numbers, which know its
    wrapper, and return what ends that. A program in which warnings are errors must not end by them.

    torch asks one function; where it is missing, the warning is filtered.
    """
    original = getattr(_hooks, "_has_any_global_hook", None)
    if original is None:
        warnings.filterwarnings("ignore", _ABOUT_GLOBAL_HOOKS, UserWarning)
        return lambda: None

    def has_hooks_of_others() -> bool:
        if not original():
            return False
        return any(getattr(_hooks, name, None) for name in _BACKWARD_HOOKS) or any(
            number not in numbers for name in _GLOBAL_HOOKS for number in getattr(_hooks, name, ())
        )

    _hooks._has_any_global_hook = has_hooks_of_others

    def restore() -> None:
        if _hooks._has_any_global_hook is has_hooks_of_others:
            _hooks._has_any_global_hook = original

    return restore


# ---------------------------------------------------------------- under torch.compile's tracing

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_while_tracing(func: Function) -> Function:
    """Have torch.compile call a function while it traces, and take its result for a constant.

    `torch.compiler.assume_constant_result` without the import of the compiler. A torch that does
    not know the mark traces the function.
    """
    func._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return func


_unseen: dict[Any, Any] = {}


def unseen_by_compiler(func: Function) -> Function:
    """Return a function in a form that runs as written inside compiled code, once there can be any:
    a graph ends before it.
    """
    if "torch._dynamo" not in _modules:
        return func
    if func not in _unseen:
        disable: Any = torch.compiler.disable
        _unseen[func] = disable(func)
    return _unseen[func]  # type: ignore[no-any-return]


def hook_while_tracing(
    module: torch.nn.Module, hook: Callable[..., None]
) -> tuple[torch.nn.Module, HookTable, HookTable]:
    """Hook a module's forward in code that torch.compile traces; return what undoes it.

    torch.compile cannot follow a registration. It follows that the table is another object for a
    while, and since the first one is there again in the end, compiled code changes no module. Read
    from `vars()` because the attribute of an empty table has no source to write back.
    """
    kept = vars(module)
    hooks, with_keywords = kept["_forward_hooks"], kept["_forward_hooks_with_kwargs"]
    changed: Any = module
    changed._forward_hooks = {**hooks, _TRACED_HOOK - len(hooks): hook}
    changed._forward_hooks_with_kwargs = {**with_keywords, _TRACED_HOOK - len(hooks): True}
    return module, hooks, with_keywords


_TRACED_HOOK = -1_000_000
"""torch counts its hooks from 0 up: these numbers are not among them, whatever is there before."""


def unhook_after_tracing(
    module: torch.nn.Module, hooks: HookTable, with_keywords: HookTable
) -> None:
    """Give a module the tables back that `hook_while_tracing` returned."""
    changed: Any = module
    changed._forward_hooks, changed._forward_hooks_with_kwargs = hooks, with_keywords


# ---------------------------------------------------------------- invisibility

disable_torch_function: Callable[[], contextlib.AbstractContextManager[object]] = getattr(
    _C, "DisableTorchFunction", contextlib.nullcontext
)
"""Context without any `__torch_function__`; without the name modes see our reads."""

_HIDDEN_KEYS = (
    "Python", "PythonTLSSnapshot", "PythonDispatcher", "PreDispatch", "Functionalize",
    "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched",
    "FuncTorchVmapMode", "FuncTorchGradWrapper", "FuncTorchBatchedDecomposition",
    "AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastHPU",
    "AutocastIPU", "AutocastMTIA", "AutocastMAIA", "AutocastXLA", "AutocastPrivateUse1",
)  # fmt: skip


def _hidden_keys() -> object | None:
    keys, kinds = getattr(_C, "DispatchKeySet", None), getattr(_C, "DispatchKey", None)
    if keys is None or kinds is None:
        return None
    chosen = None
    for name in _HIDDEN_KEYS:
        key = kinds.__members__.get(name)
        if key is not None:
            chosen = keys(key) if chosen is None else chosen | keys(key)
    return chosen


_KEYS = _hidden_keys()


def operation_guards() -> Iterable[contextlib.AbstractContextManager[object]]:
    """Return fresh guards that keep autograd, autocast, functorch and modes out.

    Where the names are missing, autograd alone is switched off.
    """
    yield disable_torch_function()
    exclude = getattr(_C, "_ExcludeDispatchKeyGuard", None)
    if exclude is not None and _KEYS is not None:
        yield exclude(_KEYS)
    below = getattr(_C, "_AutoDispatchBelowAutograd", None)
    yield below() if below is not None else torch.no_grad()


# ---------------------------------------------------------------- kinds of tensors


def _bits_by_key_set() -> Callable[[torch.Tensor], int] | None:
    keys = getattr(_C, "_dispatch_keys", None)
    raw = getattr(getattr(_C, "DispatchKeySet", None), "raw_repr", None)
    return None if keys is None or raw is None else lambda tensor: int(raw(keys(tensor)))


dispatch_bits: Callable[[torch.Tensor], int] = _bits_by_key_set() or (lambda tensor: 0)
"""Dispatch keys of a tensor as one number: kinds differ in it; without the names always 0."""


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """True for the wrappers of torch.func and functionalization: they have no memory."""
    wrapped = getattr(getattr(_C, "_functorch", None), "is_functorch_wrapped_tensor", None)
    functional = getattr(torch, "_is_functional_tensor", None)
    return bool(
        (wrapped is not None and wrapped(tensor)) or (functional is not None and functional(tensor))
    )


def overrides_dispatch(kind: type) -> bool:
    """True for classes with a `__torch_dispatch__` of their own: memory is not value."""
    own = getattr(kind, "__torch_dispatch__", None)
    return getattr(own, "__func__", own) is not getattr(
        torch.Tensor.__torch_dispatch__, "__func__", torch.Tensor.__torch_dispatch__
    )


def _loaded(module: str, name: str) -> type | None:
    """Return a class of a module somebody else imported: else no such object exists."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def is_dtensor(kind: type) -> bool:
    """True for DTensor and its subclasses."""
    dtensor = _loaded("torch.distributed.tensor", "DTensor")
    return dtensor is not None and issubclass(kind, dtensor)


def is_async_collective(kind: type) -> bool:
    """True for the class of values that a functional collective may still be writing."""
    waiting = _loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    return waiting is not None and issubclass(kind, waiting)


def async_collective_result(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return the plain tensor behind an AsyncCollectiveTensor, and whether it may be read.

    Nothing is waited for. It may be read once somebody has waited: the tensor says so itself, or no
    functional collective of this process is outstanding. Without torch's names it never may.
    """
    waiting: Any = tensor
    result = getattr(waiting, "elem", None)
    if not isinstance(result, torch.Tensor):
        return tensor, False
    return result, bool(getattr(waiting, "completed", False)) or not is_collective_outstanding()


def is_collective_outstanding() -> bool:
    """True while a functional collective of this process has not been waited for, or torch does not
    tell.
    """
    count = getattr(getattr(_C, "_distributed_c10d", None), "_get_work_registry_size", None)
    return count is None or count() != 0


def dtensor_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return local tensor and spec of a DTensor, past its properties (modes see those)."""
    parts: Any = tensor
    return parts._local_tensor, parts._spec


def placement_class(placement: object) -> str:
    """Return the name of exactly the four classes of `_PLACEMENTS`, else ""."""
    kind = type(placement)
    if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        return ""
    is_torchs = kind.__module__ == "torch.distributed.tensor.placement_types"
    return kind.__name__ if is_torchs and kind.__name__ in _PLACEMENTS else ""


_PLACEMENTS = frozenset({"Shard", "_StridedShard", "Replicate", "Partial"})


def shard_order(spec: object) -> tuple[int, ...] | None:
    """Return the mesh axes in the order in which they cut, None for their own order.

    Newer torch can shard a dim over axes in another order than the mesh's; without the field the
    order is the mesh's.
    """
    order = getattr(spec, "shard_order", None)
    if not order:
        return None
    axes = [axis for entry in order for axis in entry.mesh_dims]
    is_sorted = all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order)
    return None if is_sorted else tuple(axes)


# ---------------------------------------------------------------- meshes and groups


def mesh_ranks(mesh: Any) -> tuple[int, ...]:
    """Return the global ranks of a DeviceMesh in row-major order. Runs torch operations."""
    return tuple(int(rank) for rank in mesh.mesh.flatten().tolist())


def default_groups() -> list[tuple[object, str, Sequence[int], str]]:
    """Return (group, name, global ranks in group order, backend) of this rank's groups.

    Without torch's own table there is nothing to list, and the list is empty.
    """
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    if world is None:
        return []
    found: list[tuple[object, str, Sequence[int], str]] = []
    names = getattr(world, "pg_names", {})
    for group, members in list(getattr(world, "pg_group_ranks", {}).items()):
        if group not in names:
            continue  # a placeholder for groups of others
        ranks = [rank for rank, _ in sorted(members.items(), key=lambda item: item[1])]
        name = str(names[group])
        backend = str(getattr(world, "pg_map", {}).get(group, ("",))[0])
        found.append((group, name, ranks, backend))
    return found


def group_ranks(group: object) -> tuple[int, ...] | None:
    """Return the global ranks of a process group in the order of its own; None where torch's table
    does not have it.
    """
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    members = getattr(world, "pg_group_ranks", {}).get(group)
    return None if members is None else tuple(sorted(members, key=members.__getitem__))


def group_named(name: str) -> Any:
    """Return the process group that functional collectives call by this name.

    Without the name of the function, None: the collective's group is then not known.
    """
    resolve = getattr(getattr(_C, "_distributed_c10d", None), "_resolve_process_group", None)
    return resolve(name) if resolve is not None else None


def collective_classes() -> tuple[Any, Any, Any] | None:
    """Return the classes of process groups, of the work they hand out and of a work's future, as
    C++ made them; None in a torch without distributed.
    """
    c10d, future = getattr(_C, "_distributed_c10d", None), getattr(_C, "Future", None)
    group, work = getattr(c10d, "ProcessGroup", None), getattr(c10d, "Work", None)
    return None if group is None or work is None or future is None else (group, work, future)


def functional_operators(names: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    """Return (name, operator) of those of the (namespace, name) operators this torch has.

    Every Python call of one goes through the attribute `_op` of the object returned; where it has
    none, the operator is left out and its calls are not seen.
    """
    found = []
    for space, name in names:
        operator = getattr(getattr(torch.ops, space, None), name, None)
        if hasattr(operator, "_op"):
            found.append((name, operator))
    return found


def default_store() -> Any:
    """Return the store of the default process group, None where torch does not say."""
    find = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    return find() if find is not None else None


_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")


def shape_inference() -> frozenset[CodeType]:
    """Return the functions in which a pipeline stage runs once on empty memory, to learn shapes.

    Without their names, or where no pipeline was imported, there are none: that run then counts as
    a micro-batch.
    """
    stage = getattr(_modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    if stage is None:
        return frozenset()
    found = (getattr(getattr(stage, name, None), "__code__", None) for name in _INFERENCE)
    return frozenset(code for code in found if code is not None)


_MOST_FRAMES = 20


def sharded_module_in_hand() -> torch.nn.Module | None:
    """Return the module whose gradients FSDP2 is reducing on this thread's Python stack.

    At the end of backward it does so for what no hook of the graph has reached. Without its names,
    None: such a reduction then belongs to no module.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "post_backward":
            modules = getattr(frame.f_locals.get("self"), "modules", None)
            if isinstance(modules, tuple) and modules:
                return modules[0] if isinstance(modules[0], torch.nn.Module) else None
        frame = frame.f_back
    return None


# ---------------------------------------------------------------- pytrees


def registered_children(
    value: object, libraries: frozenset[str]
) -> list[tuple[str, object]] | None:
    """Return the named children of an instance of a pytree node that one of these libraries
    registered, else None.

    Runs the flatten function it registered. Without torch's table nothing is registered.
    """
    from torch.utils import _pytree  # here: it imports optree machinery that most runs never need

    node = getattr(_pytree, "SUPPORTED_NODES", {}).get(type(value))
    if node is None or str(node.flatten_fn.__module__).partition(".")[0] not in libraries:
        return None
    with_keys = getattr(node, "flatten_with_keys_fn", None)
    if with_keys is not None:
        return [(_key_name(key), child) for key, child in with_keys(value)[0]]
    return [(str(index), child) for index, child in enumerate(node.flatten_fn(value)[0])]


def _key_name(key: object) -> str:
    for attribute in ("key", "name", "idx"):
        found = getattr(key, attribute, None)
        if isinstance(found, (str, int)):
            return str(found)
    return type(key).__name__
