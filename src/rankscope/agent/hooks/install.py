"""Putting hooks on and taking them off: global ones while a step is traced or the next one is
watched for, none else; and those that `--rs-perturb` asks for.

What torch.compile compiles is valid for the hooks that were on, by their numbers. So there are two
states only, all hooks on or all off, always under the same numbers; what they do is switched
inside.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from rankscope.agent.guard import Guard, GuardedHook, attempt, do_nothing, say, text_of
from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.capture.torch_internals.compiling import (
    forget_keyword_hook,
    global_hook_tables,
    hide_from_compiled_modules,
    is_compiling,
    own_hook_tables,
)

Hook = Callable[..., None]


def _number() -> int:
    """Return a number that torch gives to no hook of anybody else's."""
    # torch counts hooks in one counter for the whole process: a number taken from it is nobody
    # else's
    return RemovableHandle(OrderedDict()).id


_ENTER, _LEAVE, _OWN_INPUT, _OWN_OUTPUT = (_number() for _ in range(4))
"""Numbers of our hooks, the same for every session of this process."""


class HookSet:
    """The hooks of one session. Every method may be called in any state, any number of times."""

    def __init__(self, guard: Guard, watch: Hook) -> None:
        self._guard = guard
        self._watch: Hook = watch
        self._before: Hook = do_nothing
        self._after: Hook = do_nothing
        self._entering = GuardedHook(guard, do_nothing)
        self._leaving = GuardedHook(guard, do_nothing)
        self._own_input = GuardedHook(guard, do_nothing)
        self._own_output = GuardedHook(guard, do_nothing)
        self._optimizer_hooks: list[GuardedHook] = []
        # bound once: hooks are told apart by identity
        self._enter, self._leave = self._entering.run, self._leaving.run
        self._on_input, self._on_output = self._own_input.run, self._own_output.run
        self._tables = global_hook_tables()
        self._is_on = False
        self.is_tracing = False
        self._handles: list[RemovableHandle] = []
        """Handles of global hooks, where torch's tables have other names."""
        self._on_modules: list[tuple[int, tuple[dict[int, Any], ...]]] = []
        """Numbers of our hooks, and the tables of modules in which they stand."""
        self._on_optimizers: list[RemovableHandle] = []
        self._numbers = {_ENTER, _LEAVE}
        self._unhide = hide_from_compiled_modules(self._numbers)

    def follow_with(self, *, before: Hook, after: Hook, own_input: Hook, own_output: Hook) -> None:
        """Say what the hooks of a traced step do; once, before the first."""
        self._before, self._after = before, after
        self._own_input.body, self._own_output.body = own_input, own_output

    def watch_optimizers(self, begins: Hook, ends: Hook) -> None:
        """Hook every optimizer step, for the whole session."""
        before, after = GuardedHook(self._guard, begins), GuardedHook(self._guard, ends)
        self._optimizer_hooks = [before, after]
        self._on_optimizers = [
            register_optimizer_step_pre_hook(before.run),
            register_optimizer_step_post_hook(after.run),
        ]

    def watch_for_step(self) -> None:
        """Have the pre-hook notice the next root forward."""
        if not self.is_tracing and not self._is_on:
            self._entering.body, self._leaving.body = self._watch, do_nothing
            self._install_hooks()

    def stop_watching(self) -> None:
        """Take the hooks off unless they trace: from now on module calls cost nothing."""
        if not self.is_tracing:
            self._remove_hooks()

    def trace(self) -> None:
        """Have the global hooks trace, behind those of everybody else."""
        if not self.is_tracing:
            self._remove_hooks()
            self._entering.body, self._leaving.body = self._before, self._after
            self._install_hooks()
            self.is_tracing = True

    def stop_tracing(self) -> None:
        """Take the hooks of a traced step off again, those on modules included."""
        self.leave_modules()
        if self.is_tracing:
            self.is_tracing = False
            self._remove_hooks()

    def _install_hooks(self) -> None:
        self._is_on = True
        if self._tables is None:
            self._handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            ]
            self._numbers.update(handle.id for handle in self._handles)
            return
        before, after, always_called, taking_keywords = self._tables
        before.pop(_ENTER, None)  # of a session that could not take them off: we stand at the end
        after.pop(_LEAVE, None)
        # into torch's tables by hand: each `register_*` gives a new number, compiled code is valid
        # for the numbers it saw, and every traced step would compile the model again
        before[_ENTER] = self._enter
        after[_LEAVE] = self._leave
        always_called[_LEAVE] = taking_keywords[_LEAVE] = True

    def _remove_hooks(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        if self._tables is None:
            for handle in self._handles:
                handle.remove()
                forget_keyword_hook(handle.id)
            self._handles = []
            return
        before, after, always_called, taking_keywords = self._tables
        # only ours: another session of this process may stand there by now
        if before.get(_ENTER) is self._enter:
            del before[_ENTER]
        if after.get(_LEAVE) is self._leave:
            for table in (after, always_called, taking_keywords):
                table.pop(_LEAVE, None)

    def enter(self, *call: object) -> None:
        """Do what the global pre-hook does for a call that torch runs without hooks."""
        if self._is_on:
            self._enter(*call)

    def leave(self, *call: object) -> None:
        """Do what the global forward hook does for a call that torch runs without hooks."""
        if self._is_on:
            self._leave(*call)

    # ------------------------------------------------------------------ hooks on modules

    def trace_own_hooks_of(self, modules: Iterable[nn.Module]) -> None:
        """Stand behind the hooks that modules already have: we must see what they replace."""
        for module in modules:
            tables = own_hook_tables(module)
            if tables is None:
                continue
            before, before_keywords, after = tables
            if before and before.get(_OWN_INPUT) is not self._on_input:
                before.pop(_OWN_INPUT, None)  # of a copy made while we stood there
                before[_OWN_INPUT] = self._on_input
                before_keywords[_OWN_INPUT] = True
                self._on_modules.append((_OWN_INPUT, (before, before_keywords)))
            if after and after.get(_OWN_OUTPUT) is not self._on_output:
                after.pop(_OWN_OUTPUT, None)
                after[_OWN_OUTPUT] = self._on_output
                self._on_modules.append((_OWN_OUTPUT, (after,)))

    def stands_behind_inputs_of(self, module: nn.Module) -> bool:
        """True where our hook follows the module's own pre-hooks."""
        return module._forward_pre_hooks.get(_OWN_INPUT) is self._on_input

    def stands_behind_outputs_of(self, module: nn.Module) -> bool:
        """True where our hook follows the module's own forward hooks."""
        return module._forward_hooks.get(_OWN_OUTPUT) is self._on_output

    def leave_modules(self) -> None:
        """Take our hooks off the modules that have hooks of their own."""
        for number, tables in self._on_modules:
            for table in tables:
                table.pop(number, None)
        self._on_modules = []

    # ------------------------------------------------------------------ the end

    def remove_all(self, *, is_inside_hook: bool = False) -> None:
        """Remove all hooks from torch. Inside a hook torch may be iterating over its tables, and a
        change would raise into the program: then the hooks only stop working, and go at the next
        call of a module."""
        if not (is_inside_hook or self._guard.is_failing):
            self._remove_now()
            return
        self.leave_modules()
        for hook in (self._leaving, self._own_input, self._own_output, *self._optimizer_hooks):
            hook.body = do_nothing
        self._entering.body = self._remove_now  # torch walks over a copy of the pre-hooks
        if not self._is_on:
            self._install_hooks()

    def _remove_now(self, *arguments: object) -> None:
        self.stop_tracing()
        self._remove_hooks()
        for handle in self._on_optimizers:
            handle.remove()
        self._on_optimizers = []
        self._unhide()


_DTYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class _Calls(threading.local):
    depth = 0
    is_expected = False
    """The outermost call had no floating-point input, so the first such output is the one to
    watch."""


class Perturbation:
    """Multiplies the floating-point inputs of every outermost module call by 1 plus or minus some
    roundings; without any, the first such output of a module inside. An element's sign follows from
    its value, so the program's random numbers stay. Keyword inputs and recomputed calls are left
    alone."""

    def __init__(self, roundings: int) -> None:
        """Put the hooks on; `roundings` is in units of `torch.finfo(dtype).eps`."""
        self._roundings = roundings
        self._calls = _Calls()
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if is_compiling():
            return None
        self._calls.depth += 1
        if self._calls.depth > 1 or current_graph_task() != -1:
            return None
        changed = self._attempt(lambda: tuple(map(self._off, args)))
        if changed is not None:
            self._calls.is_expected = all(a is b for a, b in zip(args, changed))
        return changed

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if is_compiling():
            return None
        self._calls.depth = max(self._calls.depth - 1, 0)
        if not self._calls.is_expected or current_graph_task() != -1:
            return None
        changed = self._attempt(lambda: self._first_off(output))
        if changed is not None:
            self._calls.is_expected = False
        return changed

    def _attempt(self, change: Callable[[], Any]) -> Any:
        """Return the changed value; None, and change nothing from then on, if changing fails."""
        changed: list[Any] = []
        error = attempt(lambda: changed.append(change()))
        if error is None:
            return changed[0]
        self.remove()
        say(f"inputs are no longer changed (--rs-perturb): {text_of(error)}")
        return None

    def _first_off(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            changed = self._off(output)
            return None if changed is output else changed
        if type(output) in (tuple, list):
            for index, value in enumerate(output):
                changed = self._off(value)
                if changed is not value:
                    return type(output)((*output[:index], changed, *output[index + 1 :]))
        if isinstance(output, Mapping) and hasattr(output, "update"):
            for name, value in output.items():
                changed = self._off(value)
                if changed is not value:
                    output.update({name: changed})
                    return output
        return None

    def _off(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _DTYPES:
            return value
        with torch.no_grad():
            signs = torch.sign(torch.sin(value.detach().float() * 997.0))
            off = self._roundings * torch.finfo(value.dtype).eps * signs.double()
            factors = (1 + off).to(value.dtype)
        return value * factors
