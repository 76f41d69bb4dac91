"""Which module is which: roots, canonical paths, wrappers, and what a module holds.

The canonical path is the path from the root with every wrapper (DDP, FSDP1, checkpoint wrapper,
`torch.compile`) removed, so that a model has the same paths however it is parallelized. Members are
read off torch's own tables: a user's class may override every method that lists them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rankscope.capture.torch_internals.compiling import dynamo_has_compiled, is_compiled_in_place
from rankscope.capture.torch_internals.distributed import is_sync_off
from rankscope.globs import glob_matches


def modules_of(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (raw path, module) of a module and all below it, each once, in torch's own order."""
    visited: set[int] = set()
    # a stack of our own: a deep model must not meet the recursion limit because we walk it
    waiting = [("", top)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield path, module
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in module._modules.items()
            if child is not None
        ]
        # taken from the end: reversed, so that the order is that of `named_modules`
        waiting.extend(reversed(children))


def parameters_of_module(top: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of a module and of all below it, each once, in torch's own order."""
    visited: set[int] = set()
    for _, module in modules_of(top):
        for parameter in own_parameters(module).values():
            if parameter is not None and id(parameter) not in visited:
                visited.add(id(parameter))
                yield parameter


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name; scripted modules keep theirs in C++."""
    parameters = module._parameters
    return parameters if isinstance(parameters, dict) else dict(parameters.items())


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name; scripted modules keep theirs in C++."""
    buffers = module._buffers
    return buffers if isinstance(buffers, dict) else dict(buffers.items())


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that backward left for a parameter. Between forward and backward FSDP1
    replaces parameters by views of its flat one: as non-leaves they hold no gradient, and torch
    would warn."""
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None


_WRAPPED_ATTRIBUTE = {
    "torch.nn.parallel.distributed.DistributedDataParallel": ("module", "DDP"),
    "torch.nn.parallel.data_parallel.DataParallel": ("module", "DataParallel"),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module",
        "FSDP1",
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": (
        "_checkpoint_wrapped_module",
        "checkpoint",
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper": (
        "_checkpoint_wrapped_module",
        "offload",
    ),
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod", "compile"),
}
"""Wrapper class -> (attribute holding the wrapped module, the word the trace uses)."""
_FSDP2 = "torch.distributed.fsdp.FSDPModule"
"""Base of the class that fully_shard() gives a module: no wrapper, but it has another name."""

_wrappers: dict[type, tuple[str, str] | None] = {}


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def wrapper_of(module: nn.Module) -> tuple[str, str] | None:
    """Return a wrapper's attribute for the wrapped module and the trace's word, or None."""
    cls = type(module)
    if cls not in _wrappers:
        # by name: nothing is imported for a wrapper that the program does not use
        wrappers = (_WRAPPED_ATTRIBUTE.get(_qualified(base)) for base in cls.__mro__)
        _wrappers[cls] = next((wrapper for wrapper in wrappers if wrapper is not None), None)
    return _wrappers[cls]


def own_class(cls: type) -> tuple[type, tuple[str, ...]]:
    """Return the class the user wrote and the words for what was put over it in place."""
    if any(_qualified(base) == _FSDP2 for base in cls.__mro__):
        user_class = next(
            c for c in cls.__mro__[1:] if issubclass(c, nn.Module) and _qualified(c) != _FSDP2
        )
        return user_class, ("FSDP2",)
    return cls, ()


def class_behind_wrappers(module: nn.Module) -> type:
    """Return the user's class of the module inside all wrappers."""
    while (wrapper := wrapper_of(module)) is not None:
        module = getattr(module, wrapper[0])
    return own_class(type(module))[0]


_Named = tuple[str, list[str], str | None]
"""Canonical path of a module, the wrappers that end with it, the name of what it wraps."""
_MOST_LOOSE = 4096
_FEWEST_KEPT = 1024
"""Number of modules from which on dead ones are looked for."""


def _owns_parameters(module: nn.Module) -> bool:
    return next(parameters_of_module(module), None) is not None


@dataclass(eq=False, slots=True)
class Root:
    """An outermost called module that owns parameters (or one called outside any such module)."""

    module: weakref.ReferenceType[nn.Module]
    class_name: str
    parameter_count: int
    """Elements over all parameters, DTensors by their global shape."""
    depth: int = 0
    definition: int = 0
    """Number of the module's definition in the spool; 0 until it is defined."""
    definitions: dict[tuple[object, ...], int] = field(default_factory=dict)
    is_preferred: bool = False
    """The user named this module as the root of the trace."""
    is_setup_recorded: bool = False
    is_hidden: bool = False
    """Found through an optimizer's parameters: compiled, so no hook saw its calls."""
    calls_in_step: int = 0
    trainable: tuple[weakref.ref[nn.Module], str] | None = None
    """Owner and name of a parameter that needed a gradient, asked first the next time. A weak
    reference to the parameter itself would keep torch from swapping it."""
    sides: list[Root] = field(default_factory=list)
    """Roots with trainable parameters that this root's modules call and do not contain
    (adapters)."""
    walked_in: object = None
    """The last forward in which an unknown module caused a walk: one walk a forward is enough."""

    def builds_graph(self, module: nn.Module) -> bool:
        """True where a forward of the root's `module` reaches a parameter that needs a gradient."""
        return self.needs_gradient(module) or any(
            (top := side.module()) is not None and side.needs_gradient(top) for side in self.sides
        )

    def needs_gradient(self, module: nn.Module) -> bool:
        """True where a parameter of `module`, which belongs to this root, needs a gradient."""
        if self.trainable is not None:
            owner, name = self.trainable[0](), self.trainable[1]
            parameter = own_parameters(owner).get(name) if owner is not None else None
            if parameter is not None and parameter.requires_grad:
                return True
        self.trainable = None
        for _, child in modules_of(module):
            for name, parameter in own_parameters(child).items():
                if parameter is not None and parameter.requires_grad:
                    self.trainable = weakref.ref(child), name
                    return True
        return False


@dataclass(eq=False, slots=True)
class ModuleInfo:
    """What a hook must know about one module, looked up by identity at every call."""

    module: weakref.ReferenceType[nn.Module]
    path: str
    """Canonical path from its root; "@ClassName" outside every root."""
    raw_path: str
    class_name: str
    wrappers: tuple[str, ...]
    root: Root | None
    is_wrapper: bool
    is_loose: bool = False
    """No root contains it; the entry stands for all such modules of its class."""
    is_opaque: bool = False
    is_selected: bool = True
    definition: int = 0
    own_parameters: list[str] = field(default_factory=list)
    """Names in the module's own `_parameters`; tied parameters under their first name only."""


class ModuleTable:
    """Every module seen so far, by identity; never keeps one alive."""

    def __init__(
        self,
        *,
        enters_compiled: bool = False,
        paths: tuple[str, ...] = ("*",),
        find_network: Callable[[nn.Module], nn.Module | None] | None = None,
    ) -> None:
        """With `enters_compiled` compile wrappers are folded like others: traced steps run
        uncompiled. `find_network` returns the trained network of a module that no root holds."""
        self._enters_compiled = enters_compiled
        self._find_network = find_network
        self._paths = self._selected = paths
        self.infos: dict[int, tuple[weakref.ReferenceType[nn.Module], ModuleInfo]] = {}
        self._loose: dict[tuple[Root | None, str, type], ModuleInfo] = {}
        self._prune_above = _FEWEST_KEPT
        self._paths_of_dead: set[str] = set()
        self.roots: list[Root] = []
        self.contained: list[tuple[Root, Root, str]] = []
        """(root, root that contains it, its path there), not yet written to the spool."""

    def get(self, module: nn.Module) -> ModuleInfo | None:
        """Return the entry of a module, None for one never seen or one gone."""
        entry = self.infos.get(id(module))
        # an id is given again once its module is gone: only the weak reference proves which one
        # this is
        return entry[1] if entry is not None and entry[0]() is module else None

    def learn(
        self,
        module: nn.Module,
        inside: Root | None,
        caller: nn.Module | None = None,
        forward: object = None,
    ) -> ModuleInfo:
        """Add a module at its first call, `inside` the root whose forward is running (None at the
        outermost level); `forward` identifies this forward of the root."""
        if inside is None and _owns_parameters(module):
            return self._learn_root(module)
        if inside is not None:
            registered = self._learn_registered(module, inside, caller, forward)
            if registered:
                return registered
        user_class, _ = own_class(type(module))
        # once for each class and place: the search goes through the optimizers, and programs make
        # such modules in every forward
        is_first = (inside, f"@{user_class.__name__}", type(module)) not in self._loose
        if is_first and self._find_network is not None and _owns_parameters(module):
            network = self._find_network(module)
            if network is not None:
                self._learn_root(network)
        for below, child in modules_of(module):
            if self.get(child) is None:
                self._add_loose(child, f"@{user_class.__name__}{below and '.'}{below}", inside)
        info = self.get(module)
        assert info is not None  # added just above
        return info

    def _learn_registered(
        self, module: nn.Module, root: Root, caller: nn.Module | None, forward: object
    ) -> ModuleInfo | None:
        """Find a module that was registered after the first forward of its root. Programs may
        create modules in every forward, so only the caller's new children are added, and the root
        is walked at most once a forward."""
        holder = self.get(caller) if caller is not None else None
        if (
            caller is not None
            and holder is not None
            and holder.root is root
            and not (holder.is_wrapper or holder.is_loose)
        ):
            name = next((n for n, child in caller._modules.items() if child is module), None)
            if name is not None:
                raw = f"{holder.raw_path}.{name}" if holder.raw_path else name
                self._add_below(root, module, raw, {holder.raw_path: (holder.path, [], None)})
                return self.get(module)
        if forward is None or root.walked_in is not forward:
            root.walked_in = forward
            self._walk(root)
        return self.get(module)

    def prefer(self, module: nn.Module) -> ModuleInfo:
        """Make a module the root with path "" before it is called, parameters or not."""
        info = self._learn_root(module)
        if info.root is not None:
            info.root.is_preferred = True
            self._walk(info.root)  # again: roots that were named before are inside it only now
        return info

    def of_root(self, root: Root) -> Iterator[tuple[ModuleInfo, nn.Module]]:
        """Yield the modules of a root, in the model's own order."""
        for info, module in self._walk(root):
            if not info.is_wrapper and info.root is root:
                yield info, module

    def compiled_in_place(self, root: Root) -> tuple[ModuleInfo, ...]:
        """Return the outermost modules below a root that `module.compile()` hides from hooks."""
        if self._enters_compiled or not dynamo_has_compiled():
            return ()
        compiled: list[ModuleInfo] = []
        hidden: tuple[str, ...] = ()
        for info, module in self.of_root(root):
            if not info.path or f"{info.path}.".startswith(hidden):
                continue
            if is_compiled_in_place(module):
                if not info.is_opaque:
                    # 0 has it defined once more: its definition in the spool says that it can be
                    # entered
                    info.is_opaque, info.definition = True, 0
                compiled.append(info)
            if info.is_opaque:
                hidden = (*hidden, f"{info.path}.")
        return tuple(compiled)

    def hidden_roots(self) -> list[ModuleInfo]:
        """Return the roots whose own calls no hook can see."""
        return [
            info
            for root in self.roots
            if (module := root.module()) is not None
            and (info := self.get(module)) is not None
            and (root.is_hidden or is_compiled_in_place(module))
        ]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of every root."""
        for root in self.roots:
            if (top := root.module()) is not None:
                yield from parameters_of_module(top)

    def paths(self) -> set[str]:
        """Return the canonical paths of all modules seen."""
        return self._paths_of_dead | {info.path for _, info in self._living()}

    def unsynced_parameters(self) -> frozenset[int]:
        """Return the identities of the parameters whose gradients are not to be reduced now."""
        return frozenset(
            id(parameter)
            for reference, _ in self._living()
            if (module := reference()) is not None and is_sync_off(module)
            for parameter in parameters_of_module(module)
        )

    def with_wrappers(self, root: Root) -> list[nn.Module]:
        """Return the known modules of a root, wrappers among them."""
        modules = (module() for module, info in self._living() if info.root is root)
        return [module for module in modules if module is not None]

    def with_hooks(self, root: Root) -> list[nn.Module]:
        """Return the known modules of a root that have forward hooks of their own."""
        modules = self.with_wrappers(root)
        return [m for m in modules if m._forward_pre_hooks or m._forward_hooks]

    def _learn_root(self, module: nn.Module) -> ModuleInfo:
        core = module
        outer: list[nn.Module] = []
        words: list[str] = []
        while (wrapper := wrapper_of(core)) is not None and not self._is_opaque(wrapper):
            outer.append(core)
            words.append(wrapper[1])
            core = getattr(core, wrapper[0])
        core_info = self.get(core)
        if core_info is not None and core_info.root is not None:
            root, path = core_info.root, core_info.path
        else:
            user_class = class_behind_wrappers(core)
            elements = sum(0 if is_lazy(p) else p.numel() for p in parameters_of_module(core))
            root = Root(weakref.ref(core), user_class.__name__, elements)
            path = ""
            self.roots.append(root)
        for wrapped in outer:
            wrapper_info = self._add(wrapped, path, path, root, [])
            wrapper_info.is_wrapper = True
        self._walk(root)
        if (
            words
            and (top := self.get(core)) is not None
            and top.wrappers[: len(words)] != (*words,)
        ):
            top.wrappers = (*words, *top.wrappers)
        info = self.get(module)
        assert info is not None  # added just above
        return info

    def _is_opaque(self, wrapper: tuple[str, str]) -> bool:
        return wrapper[1] == "compile" and not self._enters_compiled

    def select_also(self, paths: tuple[str, ...]) -> None:
        """Record the modules of these globs and of the setting, until the next call."""
        selected = (*self._paths, *paths)
        if selected != self._selected:
            self._selected = selected
            for info in (*(info for _, info in self._living()), *self._loose.values()):
                info.is_selected = self._is_selected(info.path)

    def _living(self) -> list[tuple[weakref.ReferenceType[nn.Module], ModuleInfo]]:
        return [*self.infos.values()]  # at once: another thread may add to them

    def _is_selected(self, path: str) -> bool:
        return "*" in self._selected or any(glob_matches(glob, path) for glob in self._selected)

    def _walk(self, root: Root) -> list[tuple[ModuleInfo, nn.Module]]:
        """Add every module below a root that is not known yet; return all, the root's own first."""
        top = root.module()
        return self._add_below(root, top, "", {}) if top is not None else []

    def _add_below(
        self, root: Root, start: nn.Module, start_raw: str, names: dict[str, _Named]
    ) -> list[tuple[ModuleInfo, nn.Module]]:
        """Add `start` and the unknown modules below it; return all. `names` has the entry of the
        module that holds `start`, by raw path."""
        tied: set[int] = set()
        members: list[tuple[ModuleInfo, nn.Module]] = []
        for below, module in modules_of(start):
            raw = f"{start_raw}.{below}" if start_raw and below else start_raw or below
            root.depth = max(root.depth, raw.count(".") + 1)
            path, wrappers = _canonical(raw, names)
            wrapper = wrapper_of(module)
            names[raw] = (
                (path, [*wrappers, wrapper[1]], wrapper[0]) if wrapper else (path, [], None)
            )
            info = self.get(module)
            if info is not None and info.root is not None and info.root is not root:
                is_root = info.path == "" and not info.is_wrapper  # had been called as one before
                # a root that the user named keeps its paths, whoever calls it
                if is_root and (root.is_preferred or not info.root.is_preferred):
                    self.contained.append((info.root, root, path))
                continue
            if info is None or info.root is None or info.is_loose:
                info = self._add(module, path, raw, root, wrappers)
                info.is_wrapper = wrapper is not None and not self._is_opaque(wrapper)
                if wrapper is not None and not info.is_wrapper:
                    info.is_opaque = True
                    info.class_name = class_behind_wrappers(module).__name__
                    info.wrappers = (*info.wrappers, wrapper[1])
            names_here = []
            for name, parameter in own_parameters(module).items():
                if parameter is not None and id(parameter) not in tied:
                    tied.add(id(parameter))
                    names_here.append(name)
            info.own_parameters = names_here
            members.append((info, module))
        return members

    def _add(
        self, module: nn.Module, path: str, raw: str, root: Root | None, wrappers: list[str]
    ) -> ModuleInfo:
        user_class, over = own_class(type(module))
        info = ModuleInfo(
            weakref.ref(module),
            path,
            raw,
            user_class.__name__,
            (*wrappers, *over),
            root,
            is_wrapper=False,
        )
        if isinstance(module, torch.jit.ScriptModule):
            info.is_opaque = True
            info.class_name = str(module.original_name)
        info.is_selected = self._is_selected(path)
        self._keep(module, info)
        return info

    def _add_loose(self, module: nn.Module, path: str, inside: Root | None) -> None:
        """Add a module that no root holds. A program may make one in every forward, so modules of
        one class and place share an entry."""
        key = (inside, path, type(module))
        info = self._loose.get(key)
        if info is not None:
            self._keep(module, info)
            return
        if len(self._loose) >= _MOST_LOOSE:
            self._loose.clear()
        info = self._loose[key] = self._add(module, path, path, inside, [])
        info.is_loose = True

    def _keep(self, module: nn.Module, info: ModuleInfo) -> None:
        self.infos[id(module)] = weakref.ref(module), info
        if len(self.infos) > self._prune_above:
            self.forget_dead()
            # twice what is alive: pruning looks at all, so its cost for each new module stays
            # constant
            self._prune_above = max(_FEWEST_KEPT, 2 * len(self.infos))

    def forget_dead(self) -> None:
        """Forget modules that are gone: a program may make new ones in every step."""
        self.roots = [root for root in self.roots if root.module() is not None]
        alive = {None, *self.roots}
        for root in self.roots:
            root.sides = [side for side in root.sides if side in alive]
        self._loose = {key: info for key, info in self._loose.items() if key[0] in alive}
        # a copy: another thread may learn a module meanwhile
        dead = [key for key, (module, _) in [*self.infos.items()] if module() is None]
        for key in dead:
            self._paths_of_dead.add(self.infos.pop(key)[1].path)


def _canonical(raw: str, names: dict[str, _Named]) -> tuple[str, list[str]]:
    """Return the canonical path of a module and the wrappers directly around it."""
    if not raw:
        return "", []
    parent, _, last = raw.rpartition(".")
    path, wrappers, wraps = names.get(parent, (parent, [], None))
    if wraps == last:
        return path, wrappers
    return (f"{path}.{last}" if path else last), []
