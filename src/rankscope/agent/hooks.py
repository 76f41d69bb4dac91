"""Putting hooks on and taking them off: global ones for a traced step, one watching for the next
step, none else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from rankscope.capture.torch_internals import forget_keyword_hook

__all__ = ["HookSet"]

Hook = Callable[..., None]
_ABOUT_GLOBAL_HOOKS = "Using `torch.compile\\(module\\)` when there are global hooks"
"""Begin of what torch warns of when a compiled module is called: our hooks know the wrapper, and a
program run with `-W error` must not end because of them."""


class HookSet:
    """The hooks of one session. Every method may be called in any state, any number of times."""

    _before: Hook
    _after: Hook
    _own_input: Hook
    _own_output: Hook

    def __init__(self, watch: Hook) -> None:
        self._watch = watch
        self._watching: RemovableHandle | None = None
        self._tracing: list[RemovableHandle] = []
        self._on_modules: list[RemovableHandle] = []
        self._on_optimizers: list[RemovableHandle] = []
        warnings.filterwarnings("ignore", _ABOUT_GLOBAL_HOOKS, UserWarning)
        self._warning_filter = warnings.filters[0]

    def follow_with(self, *, before: Hook, after: Hook, own_input: Hook, own_output: Hook) -> None:
        """Say which hooks `trace` puts on; once, before the first traced step."""
        self._before, self._after = before, after
        self._own_input, self._own_output = own_input, own_output

    @property
    def is_tracing(self) -> bool:
        """True while global hooks see every module call."""
        return bool(self._tracing)

    def watch_optimizers(self, begins: Hook, ends: Hook) -> None:
        """Be told of every optimizer step, for the whole session."""
        self._on_optimizers = [
            register_optimizer_step_pre_hook(begins),
            register_optimizer_step_post_hook(ends),
        ]

    def watch_for_step(self) -> None:
        """Put on the one pre-hook that notices the next root forward."""
        if self._watching is None and not self._tracing:
            self._watching = register_module_forward_pre_hook(self._watch)

    def stop_watching(self) -> None:
        """Take that pre-hook off: from now on module calls cost nothing."""
        if self._watching is not None:
            self._watching.remove()
            self._watching = None

    def trace(self) -> None:
        """Put the global hooks of a traced step on."""
        self.stop_watching()
        if not self._tracing:
            self._tracing = [
                register_module_forward_pre_hook(self._before),
                register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]

    def trace_own_hooks_of(self, modules: Iterable[nn.Module]) -> None:
        """Stand behind the hooks that modules already have: what they replace is what we
        must see.
        """
        for module in modules:
            if (
                module._forward_pre_hooks
                and self._own_input not in module._forward_pre_hooks.values()
            ):
                handle = module.register_forward_pre_hook(self._own_input, with_kwargs=True)
                self._on_modules.append(handle)
            if module._forward_hooks and self._own_output not in module._forward_hooks.values():
                self._on_modules.append(module.register_forward_hook(self._own_output))

    def stands_behind_inputs_of(self, module: nn.Module) -> bool:
        """True where our hook follows the module's own pre-hooks."""
        return self._own_input in module._forward_pre_hooks.values()

    def stop_tracing(self) -> None:
        """Take the hooks of a traced step off again, those on modules included."""
        self.leave_modules()
        for handle in self._tracing:
            handle.remove()
        for handle in self._tracing:
            forget_keyword_hook(handle.id)
        self._tracing = []

    def leave_modules(self) -> None:
        """Take our hooks off the modules that have hooks of their own."""
        for handle in self._on_modules:
            handle.remove()
        self._on_modules = []

    def remove_all(self) -> None:
        """Leave nothing of ours in torch."""
        self.stop_watching()
        self.stop_tracing()
        for handle in self._on_optimizers:
            handle.remove()
        self._on_optimizers = []
        if self._warning_filter in warnings.filters and isinstance(warnings.filters, list):
            warnings.filters.remove(self._warning_filter)
