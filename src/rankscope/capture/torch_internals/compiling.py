"""Modules: torch's tables of module hooks, and torch.compile and its like: what is compiled, what
is being captured, and what runs while code is traced.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Set
from typing import Any, TypeVar

import torch

HookTable = dict[int, Any]
_hooks: Any = torch.nn.modules.module
_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks", "_global_forward_hooks",
    "_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs",
)  # fmt: skip
_BACKWARD_HOOKS = ("_global_backward_pre_hooks", "_global_backward_hooks")
_ABOUT_GLOBAL_HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks"


def forget_keyword_hook(number: int) -> None:
    """Drop the note, kept by torch for ever, that a removed global forward hook takes keywords."""
    taking_keywords = getattr(torch.nn.modules.module, "_global_forward_hooks_with_kwargs", {})
    taking_keywords.pop(number, None)


def global_hook_tables() -> tuple[HookTable, HookTable, HookTable, HookTable] | None:
    """Return torch's tables of global forward hooks by number: pre-hooks, hooks, which of these are
    always called, and which take keywords. None if one is missing: then hooks are registered
    for each step, and compiled code is compiled again each time."""
    first, second, third, fourth = (getattr(_hooks, name, None) for name in _GLOBAL_HOOKS)
    if first is None or second is None or third is None or fourth is None:
        return None
    return first, second, third, fourth


def own_hook_tables(module: torch.nn.Module) -> tuple[HookTable, HookTable, HookTable] | None:
    """Return a module's own pre-hooks, which of them take keywords, and its forward hooks; None if
    the module lacks one, so that values replaced by its hooks are not seen."""
    attributes = vars(module)
    before, keywords = (
        attributes.get("_forward_pre_hooks"),
        attributes.get("_forward_pre_hooks_with_kwargs"),
    )
    after = attributes.get("_forward_hooks")
    return (
        None if before is None or keywords is None or after is None else (before, keywords, after)
    )


def hide_from_compiled_modules(numbers: Set[int]) -> Callable[[], None]:
    """Keep a compiled module from warning of the global hooks with these numbers, and return what
    ends that: in a program where warnings are errors it would raise.

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


_C: Any = torch._C

is_compiling: Callable[[], bool] = torch.compiler.is_compiling
"""True while torch.compile traces (dynamo takes it for a constant)."""

is_jit_tracing: Callable[[], bool] = getattr(_C, "_is_tracing", lambda: False)

_modules = sys.modules
CAPTURE_FLAGS = (
    ("torch.fx._symbolic_trace", "_is_fx_tracing_flag"),
    ("torch.fx._symbolic_trace", "_is_fx_tracing_tls", "flag"),  # torch 2.14: one for each thread
    ("torch._guards", "_TLS", "tracing_context"),
)
"""Modules, with the attributes that lead to a flag which is set while a module is written down."""


Function = TypeVar("Function", bound=Callable[..., Any])


def is_being_captured() -> bool:
    """True while `torch.jit.trace`, `torch.fx` or a compiler's backend runs a module to write down
    its operations. Reading a shape would be written down with them.

    Without jit's name that is what happens; without fx's flag its proxies are seen as arguments,
    without the compiler's context its run as a call.
    """
    if is_jit_tracing():
        return True
    for module, *attributes in CAPTURE_FLAGS:
        flag: object = _modules.get(module)
        for attribute in attributes:
            flag = getattr(flag, attribute, None)
        if flag is not None and flag is not False:
            return True
    return False


def is_compiled_graph(module: torch.nn.Module) -> bool:
    """True for objects that backends of torch.compile call in place of a model: its graph, with the
    parameters among the arguments, and the compiler's wrappers of graphs (DDP's buckets)."""
    cls = type(module)
    if cls.__module__.startswith("torch._dynamo.") and cls.__name__ != "OptimizedModule":
        return True
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


def run_compiled_eagerly() -> Callable[[], None]:
    """Run all compiled code uncompiled, and return a function that ends this: it restores the
    program's stance unless the program has chosen another since."""
    stance = torch.compiler.set_stance("force_eager")

    def restore() -> None:
        chosen = getattr(stance, "stance", None)
        # a stance that the program has chosen meanwhile is its own: to leave ours would undo that
        if getattr(sys.modules["torch._dynamo.eval_frame"], "_stance", chosen) is chosen:
            stance.__exit__(None, None, None)

    return restore


def constant_while_tracing(func: Function) -> Function:
    """Make torch.compile call a function while it traces, and use the result as a constant:
    `torch.compiler.assume_constant_result` without importing the compiler. A torch without the mark
    traces the function."""
    func._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return func


def module_with(identity: int) -> torch.nn.Module:
    """Return the module that has this `id`, which has to be alive.

    A function that torch.compile takes for a constant gets its module in this way: torch 2.8 hands
    no module to one. Every torch has the compiled code hold for this very module in both ways.
    """
    module: torch.nn.Module = ctypes.cast(identity, ctypes.py_object).value
    return module


_unseen: dict[Any, Any] = {}


def unseen_by_compiler(func: Function) -> Function:
    """Return a function that runs uncompiled in compiled code: a graph ends before it."""
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
    from `__dict__` because the attribute of an empty table has no source to write back.
    """
    attributes = module.__dict__
    hooks, with_keywords = attributes["_forward_hooks"], attributes["_forward_hooks_with_kwargs"]
    changed: Any = module
    changed._forward_hooks = {**hooks, _TRACED_HOOK - len(hooks): hook}
    changed._forward_hooks_with_kwargs = {**with_keywords, _TRACED_HOOK - len(hooks): True}
    # torch 2.8 takes an empty table for a new one, which a hook registered later could not refer to
    return (
        module,
        hooks or _table(id(module), "_forward_hooks"),
        with_keywords or _table(id(module), "_forward_hooks_with_kwargs"),
    )


@constant_while_tracing
def _table(identity: int, name: str) -> HookTable:
    table: HookTable = module_with(identity).__dict__[name]
    return table


_TRACED_HOOK = -1_000_000
"""Keys of our hooks: torch counts from 0 up, so they never collide."""


def unhook_after_tracing(
    module: torch.nn.Module, hooks: HookTable, with_keywords: HookTable
) -> None:
    """Give a module the tables back that `hook_while_tracing` returned."""
    changed: Any = module
    changed._forward_hooks, changed._forward_hooks_with_kwargs = hooks, with_keywords
