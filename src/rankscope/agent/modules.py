"""Which module is which: roots, canonical paths, wrappers.

The canonical path is the path from the root with every wrapper removed, so that the same model has
the same paths however it is parallelized; the raw path is kept beside it. A wrapper (DDP, FSDP1,
checkpoint wrapper, `torch.compile`) is no node of its own: it shares the path of what it wraps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rankscope.capture.torch_internals import dynamo_has_compiled, is_compiled_in_place

__all__ = ["ModuleInfo", "ModuleTable", "Root", "own_buffers", "own_parameters"]

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
"""fully_shard() gives a module a new class with this base; it is no wrapper, but it renames the
class.
"""


_FEWEST_KEPT = 1024
"""So many modules are kept before the dead among them are looked for."""
_wrappers: dict[type, tuple[str, str] | None] = {}
"""What `_wrapper_of` found, by class: it is asked for every module of a model."""


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _wrapper_of(module: nn.Module) -> tuple[str, str] | None:
    cls = type(module)
    if cls not in _wrappers:
        found = (_WRAPPED_ATTRIBUTE.get(_qualified(base)) for base in cls.__mro__)
        _wrappers[cls] = next((wrapper for wrapper in found if wrapper is not None), None)
    return _wrappers[cls]


def _own_class(cls: type) -> tuple[type, tuple[str, ...]]:
    """Return the class the user wrote and the words for what was put over it in place."""
    if any(_qualified(base) == _FSDP2 for base in cls.__mro__):
        own = next(
            c for c in cls.__mro__[1:] if issubclass(c, nn.Module) and _qualified(c) != _FSDP2
        )
        return own, ("FSDP2",)
    return cls, ()


def _class_behind_wrappers(module: nn.Module) -> type:
    """Return the class the user wrote of what stands inside all wrappers."""
    while (wrapper := _wrapper_of(module)) is not None:
        module = getattr(module, wrapper[0])
    return _own_class(type(module))[0]


def _count_elements(module: nn.Module) -> int:
    return sum(0 if is_lazy(p) else p.numel() for p in module.parameters())


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name; scripted modules keep theirs in C++."""
    found = module._parameters
    return found if isinstance(found, dict) else dict(module.named_parameters(recurse=False))


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name; scripted modules keep theirs in C++."""
    found = module._buffers
    return found if isinstance(found, dict) else dict(module.named_buffers(recurse=False))


@dataclass(eq=False, slots=True)
class Root:
    """An outermost called module that owns parameters (or one called outside any such module)."""

    module: weakref.ReferenceType[nn.Module]
    class_name: str
    parameter_count: int
    """Elements over all parameters, DTensors by their global shape."""
    depth: int = 0
    """How deep its modules nest."""
    definition: int = 0
    """Number under which the spool knows it; 0 until it is defined."""
    is_preferred: bool = False
    """The user named it as the root of the trace."""
    is_setup_recorded: bool = False
    is_hidden: bool = False
    """Found around an optimizer's parameters: compiled, no hook saw its calls."""
    calls_in_step: int = 0
    trainable: weakref.ref[torch.Tensor] | None = None
    """A parameter found to need a gradient: asked first the next time."""

    def needs_gradient(self, module: nn.Module) -> bool:
        """True where a parameter of `module`, which belongs to this root, needs a gradient."""
        known = self.trainable() if self.trainable is not None else None
        if known is not None and known.requires_grad:
            return True
        found = next((p for p in module.parameters() if p.requires_grad), None)
        self.trainable = weakref.ref(found) if found is not None else None
        return found is not None


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
    is_opaque: bool = False
    is_selected: bool = True
    definition: int = 0
    own_parameters: list[str] = field(default_factory=list)
    """Names in the module's own `_parameters`, tied ones under their first name only."""


class ModuleTable:
    """Every module seen so far, by identity; never keeps one alive."""

    def __init__(self, *, enters_compiled: bool = False) -> None:
        """Make an empty table.

        Args:
            enters_compiled: compiled modules run as written while they are traced, so that a
                compile wrapper is folded into what it wraps like any other.
        """
        self._enters_compiled = enters_compiled
        self._infos: dict[int, ModuleInfo] = {}
        self._most = _FEWEST_KEPT
        """Modules known above which the dead ones are forgotten."""
        self._paths_of_dead: set[str] = set()
        self.roots: list[Root] = []
        self.contained: list[tuple[Root, Root, str]] = []
        """(root, the root found to contain it later, its path there), not yet written to
        the spool.
        """

    def get(self, module: nn.Module) -> ModuleInfo | None:
        """Return what is known of a module, None for one never seen (or another now at its
        address).
        """
        info = self._infos.get(id(module))
        return info if info is not None and info.module() is module else None

    def learn(self, module: nn.Module, inside: Root | None) -> ModuleInfo:
        """Make a module known that is called for the first time.

        Args:
            module: the module a hook was called for.
            inside: the root whose forward is running, None at the outermost level.
        """
        if inside is not None:
            self._walk(inside)  # a module added after the root's first forward
            found = self.get(module)
            if found:
                return found
        if inside is None and _owns_parameters(module):
            return self._learn_root(module)
        own, _ = _own_class(type(module))
        info = self._add(module, f"@{own.__name__}", f"@{own.__name__}", inside, [])
        for name, child in module.named_modules():
            if name and self.get(child) is None:
                self._add(child, f"@{own.__name__}.{name}", f"@{own.__name__}.{name}", inside, [])
        return info

    def prefer(self, module: nn.Module) -> ModuleInfo:
        """Make a module a root before it is called, and the one whose path is ""."""
        info = self.learn(module, None)
        if info.root is not None:
            info.root.is_preferred = True
        return info

    def of_root(self, root: Root) -> Iterator[ModuleInfo]:
        """Yield the known modules of a root that still exist, in the model's own order."""
        module = root.module()
        if module is None:
            return
        self._walk(root)
        seen: set[int] = set()
        for child in module.modules():
            info = self.get(child)
            if info and not info.is_wrapper and info.root is root and id(child) not in seen:
                seen.add(id(child))
                yield info

    def compiled_in_place(self, root: Root) -> tuple[ModuleInfo, ...]:
        """Return the outermost modules below a root that `module.compile()` hides from hooks."""
        if self._enters_compiled or not dynamo_has_compiled():
            return ()
        found: list[ModuleInfo] = []
        hidden: tuple[str, ...] = ()
        for info in self.of_root(root):
            module = info.module()
            if module is None or not info.path or f"{info.path}.".startswith(hidden):
                continue
            if is_compiled_in_place(module):
                if not info.is_opaque:
                    info.is_opaque, info.definition = True, 0
                found.append(info)
            if info.is_opaque:
                hidden = (*hidden, f"{info.path}.")
        return tuple(found)

    def hidden_roots(self) -> list[ModuleInfo]:
        """Return the roots whose own calls no hook can see."""
        found = []
        for root in self.roots:
            module = root.module()
            info = self.get(module) if module is not None else None
            if info is None or module is None:
                continue
            if root.is_hidden or is_compiled_in_place(module):
                found.append(info)
        return found

    def parameter_ids(self) -> frozenset[int]:
        """Return the identities of the parameters of every root."""
        return frozenset(
            id(parameter)
            for root in self.roots
            if (top := root.module()) is not None
            for parameter in top.parameters()
        )

    def paths(self) -> set[str]:
        """Return the canonical paths of all modules seen."""
        return self._paths_of_dead | {info.path for info in self._infos.values()}

    def with_hooks(self, root: Root) -> list[nn.Module]:
        """Return the known modules of a root that have forward hooks of their own."""
        modules = (info.module() for info in self._infos.values() if info.root is root)
        return [m for m in modules if m is not None and (m._forward_pre_hooks or m._forward_hooks)]

    def _learn_root(self, module: nn.Module) -> ModuleInfo:
        core = module
        outer: list[nn.Module] = []
        while (wrapper := _wrapper_of(core)) is not None and not self._is_opaque(wrapper):
            outer.append(core)
            core = getattr(core, wrapper[0])
        known = self.get(core)
        if known is not None and known.root is not None:
            root, path = known.root, known.path
        else:
            own = _class_behind_wrappers(core)
            root = Root(weakref.ref(core), own.__name__, _count_elements(core))
            path = ""
            self.roots.append(root)
        for wrapped in outer:
            info = self._add(wrapped, path, path, root, [])
            info.is_wrapper = True
        self._walk(root)
        found = self.get(module)
        assert found is not None  # added just above
        return found

    def _is_opaque(self, wrapper: tuple[str, str]) -> bool:
        return wrapper[1] == "compile" and not self._enters_compiled

    def _walk(self, root: Root) -> None:
        """Add every module below a root that is not known yet."""
        top = root.module()
        if top is None:
            return
        tied: set[int] = set()
        names: dict[str, tuple[str, list[str]]] = {}
        for raw, module in top.named_modules(remove_duplicate=True):
            parent, _, last = raw.rpartition(".")
            root.depth = max(root.depth, raw.count(".") + 1)
            path, wrappers = _canonical(top, raw, parent, last, names)
            wrapper = _wrapper_of(module)
            names[raw] = (path, [*wrappers, wrapper[1]] if wrapper else [])
            info = self.get(module)
            if info is not None and info.root is not None and info.root is not root:
                if info.path == "" and not info.is_wrapper:  # had been called as a root before
                    self.contained.append((info.root, root, path))
                continue
            if info is None or info.root is None:
                info = self._add(module, path, raw, root, wrappers)
                info.is_wrapper = wrapper is not None and not self._is_opaque(wrapper)
                if wrapper is not None and not info.is_wrapper:
                    info.is_opaque = True
                    info.class_name = _class_behind_wrappers(module).__name__
                    info.wrappers = (*info.wrappers, wrapper[1])
            own = []
            for name, parameter in own_parameters(module).items():
                if parameter is not None and id(parameter) not in tied:
                    tied.add(id(parameter))
                    own.append(name)
            info.own_parameters = own

    def _add(
        self, module: nn.Module, path: str, raw: str, root: Root | None, wrappers: list[str]
    ) -> ModuleInfo:
        own, over = _own_class(type(module))
        info = ModuleInfo(
            weakref.ref(module), path, raw, own.__name__, (*wrappers, *over), root, is_wrapper=False
        )
        if isinstance(module, torch.jit.ScriptModule):
            info.is_opaque = True
            info.class_name = str(module.original_name)
        self._infos[id(module)] = info
        if len(self._infos) > self._most:
            self.forget_dead()
            self._most = max(_FEWEST_KEPT, 2 * len(self._infos))
        return info

    def forget_dead(self) -> None:
        """Forget modules that are gone: a program may make new ones in every step."""
        self.roots = [root for root in self.roots if root.module() is not None]
        dead = [key for key, info in self._infos.items() if info.module() is None]
        for key in dead:
            self._paths_of_dead.add(self._infos.pop(key).path)


def _canonical(
    top: nn.Module, raw: str, parent: str, last: str, names: dict[str, tuple[str, list[str]]]
) -> tuple[str, list[str]]:
    """Return the canonical path of a module and the wrappers directly around it."""
    if not raw:
        return "", []
    path, wrappers = names.get(parent, (parent, []))
    wrapper = _wrapper_of(top.get_submodule(parent)) if wrappers else None
    if wrapper is not None and wrapper[0] == last:
        return path, wrappers
    return (f"{path}.{last}" if path else last), []
