"""`apply_patches`: the classes of a package replaced by others while a block runs.

A block replaces what the modules of its packages hold under a matching *name*, so every thread of
the process sees it. Several blocks may be open, of one thread or of many, and end in any order: a
name shows the replacement of the block opened last that has one for it, and the original once none
is left. Only classes that are `torch.nn.Module` are replaced, and only what stands in a module's
dictionary is looked at: nothing is imported and no code of the package runs.

`registered` says which class stands in for the classes of a name or pattern.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch import nn


class NameMap(dict[str, type[nn.Module]]):
    """Replacements under names and patterns, in their order; never changed once it is made.

    A key is both at once. It is asked first whether it equals the name; after that each key is
    searched in the name as a regular expression, so an unanchored key also matches in the middle. A
    key that is no valid expression is compared as a plain name; `invalid` says why.
    """

    def __init__(self, entries: Mapping[str, type[nn.Module]]) -> None:
        super().__init__(entries)
        self.invalid: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], type[nn.Module]]] = []
        for key, replacement in self.items():
            try:
                self._patterns.append((re.compile(key), replacement))
            except (re.error, OverflowError, RecursionError) as error:
                self.invalid[key] = str(error)

    def find(self, name: str) -> type[nn.Module] | None:
        """Return the replacement for a class: by the key that equals its name, else the first that
        matches."""
        if name in self:
            return self[name]
        return next((replacement for key, replacement in self._patterns if key.search(name)), None)


registered = NameMap({})
"""What `register_patch_mapping` fills: replaced as a whole, so every reader gets a whole state."""


# ---- imports that are watched --------------------------------------------------------------------


class ImportWatch(MetaPathFinder):
    """A finder in front of `sys.meta_path` while started; the other finders do the finding."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.before = before
        self.after = after

    def start(self) -> None:
        """Watch from now on; does nothing where it watches already."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Leave `sys.meta_path`; an import under way is still announced."""
        if self in (sys.meta_path or ()):  # None while the interpreter ends
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find by the finders after this one, with a loader that tells of its work."""
        for finder in _after(self):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _ToldLoader(spec.loader, self)
                return spec
        return None


class _ToldLoader(Loader):
    def __init__(self, loader: Loader, watch: ImportWatch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> object:
        # inspect, pkgutil and importlib.resources ask a loader for much more than a Loader has
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._watch.before()
        try:
            self._loader.exec_module(module)
        finally:
            self._watch.after()


def _after(watch: ImportWatch) -> list[object]:
    finders: list[object] = list(sys.meta_path)
    return finders[finders.index(watch) + 1 :] if watch in finders else finders


# ---- classes that are replaced -------------------------------------------------------------------


DEFAULT_PREFIX = ("transformers", "transformers_modules")
"""transformers, and the package under which it imports the code of models it has downloaded."""


@contextmanager
def apply_patches(prefix: str | Iterable[str] = DEFAULT_PREFIX) -> Iterator[None]:
    """Replace the registered classes in `prefix` and all below it until the block ends.

    Whatever the block raises, the originals are back when it has ended. A module that is first
    imported inside the block runs unpatched and is patched when it is complete, so that nothing it
    derives or keeps outlives the block. The mapping is the one registered when the block begins.
    """
    names = registered
    if not names:
        yield
        return
    block = _PatchedBlock(names, (prefix,) if isinstance(prefix, str) else tuple(prefix))
    try:
        _PATCHED.open(block)
        yield
    finally:
        _PATCHED.close(block)


class _PatchedBlock:
    def __init__(self, names: NameMap, packages: tuple[str, ...]) -> None:
        self.replacements = tuple(names.values())
        self._packages = packages
        self._inside = tuple(f"{package}." for package in packages)
        self._names = names
        self._found: dict[str, type[nn.Module] | None] = {}

    def covers(self, module_name: str) -> bool:
        return module_name in self._packages or module_name.startswith(self._inside)

    def replacement(self, name: str) -> type[nn.Module] | None:
        if name not in self._found:
            self._found[name] = self._names.find(name)
        return self._found[name]


@dataclass(slots=True)
class _ReplacedName:
    original: type[nn.Module]
    current: type[nn.Module]


@dataclass(slots=True)
class _SeenModule:
    """A module looked at while a block is open; `own` are names that held a replacement before
    anything was replaced: its home, for one."""

    module: ModuleType
    bound: dict[str, _ReplacedName] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)


class _Patched:
    """Every name that is replaced now, for all open blocks of all threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._blocks: list[_PatchedBlock] = []
        self._seen: dict[int, _SeenModule] = {}
        self._imports = 0
        self._watch = ImportWatch(self._before_import, self._after_import)

    def open(self, block: _PatchedBlock) -> None:
        with self._lock:
            self._blocks.append(block)
            self._watch.start()
            self._settle()

    def close(self, block: _PatchedBlock) -> None:
        with self._lock:
            if block in self._blocks:
                self._blocks.remove(block)
            self._settle((block,))
            if not self._blocks:
                self._watch.stop()
                self._seen.clear()

    def _before_import(self) -> None:
        with self._lock:
            self._imports += 1
            if self._imports == 1:
                self._settle()

    def _after_import(self) -> None:
        with self._lock:
            self._imports -= 1
            if self._imports == 0:
                self._settle()

    def _settle(self, ending: tuple[_PatchedBlock, ...] = ()) -> None:
        """Give every name what the open blocks say, the original while an import runs."""
        blocks = (*ending, *self._blocks)
        replacements = {id(replacement) for block in blocks for replacement in block.replacements}
        for module, covering in self._covered():
            self._settle_module(module, covering, replacements)

    def _covered(self) -> list[tuple[ModuleType, list[_PatchedBlock]]]:
        modules: dict[int, tuple[ModuleType, list[str]]] = {
            key: (record.module, []) for key, record in self._seen.copy().items()
        }
        for name, module in sys.modules.copy().items():
            if issubclass(type(module), ModuleType) and self._is_to_patch(name, module):
                modules.setdefault(id(module), (module, []))[1].append(name)
        newest_first = [] if self._imports else self._blocks[::-1]
        return [
            (module, [block for block in newest_first if any(map(block.covers, names))])
            for module, names in modules.values()
        ]

    def _is_to_patch(self, name: str, module: ModuleType) -> bool:
        """What a block covers, and lazy modules anywhere, which may keep what they fetch inside. A
        module whose code may be half run is left for after the import."""
        if self._imports:
            return id(module) in self._seen
        return _is_lazy(module) or any(block.covers(name) for block in self._blocks)

    def _settle_module(
        self, module: ModuleType, blocks: list[_PatchedBlock], replacements: set[int]
    ) -> None:
        is_new = id(module) not in self._seen
        record = self._seen.setdefault(id(module), _SeenModule(module))
        for name, value in list(vars(module).items()):
            if not (issubclass(type(value), type) and issubclass(value, nn.Module)):
                continue
            bound = record.bound.get(name)
            if bound is not None and bound.current is not value:
                del record.bound[name]  # another put this here since: it stays
                bound = None
            if bound is None and id(value) in replacements:
                if is_new or type.__getattribute__(value, "__module__") == vars(module).get(
                    "__name__"
                ):
                    record.own.add(name)
                elif name not in record.own and _is_lazy(module):
                    del vars(module)[name]  # kept on the way through: it is looked up again
                    continue
            self._bind(record, name, bound or _ReplacedName(value, value), blocks)

    def _bind(
        self, record: _SeenModule, name: str, bound: _ReplacedName, blocks: list[_PatchedBlock]
    ) -> None:
        replacements = (block.replacement(name) for block in blocks)
        value = next(
            (replacement for replacement in replacements if replacement is not None), bound.original
        )
        if value is not bound.current:
            vars(record.module)[name] = bound.current = value
            record.bound[name] = bound


def _is_lazy(module: ModuleType) -> bool:
    """Whether the module looks names up when they are asked for (PEP 562, or its own class)."""
    return "__getattr__" in vars(module) or hasattr(type(module), "__getattr__")


_PATCHED = _Patched()
