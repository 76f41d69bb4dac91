"""torch's tables of module hooks: the global ones and a module's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Set
from typing import Any

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
    always called, and which take keywords. None where one is missing: hooks are then registered
    anew each time, and each time what was compiled is compiled again."""
    first, second, third, fourth = (getattr(_hooks, name, None) for name in _GLOBAL_HOOKS)
    if first is None or second is None or third is None or fourth is None:
        return None
    return first, second, third, fourth


def own_hook_tables(module: torch.nn.Module) -> tuple[HookTable, HookTable, HookTable] | None:
    """Return a module's own pre-hooks, which of them take keywords, and its forward hooks; None
    where the module lacks one: what its hooks replace is not seen then."""
    kept = vars(module)
    before, keywords = kept.get("_forward_pre_hooks"), kept.get("_forward_pre_hooks_with_kwargs")
    after = kept.get("_forward_hooks")
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
