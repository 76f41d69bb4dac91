"""Being told before and after a module's code runs for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


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
        """Leave `sys.meta_path`; an import under way is still told of."""
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
