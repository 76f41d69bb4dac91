"""What the spool is told of modules and roots: each once, under a number that calls refer to."""

from __future__ import annotations

from rankscope.agent.hooks.modules import ModuleInfo, ModuleTable, Root
from rankscope.agent.recorder import Recorder

_MOST_DEFINITIONS = 1 << 16


class DefinitionWriter:
    """Writes definitions of modules and roots, on first sight."""

    def __init__(self, recorder: Recorder, table: ModuleTable) -> None:
        self._recorder = recorder
        self.table = table
        self._rootless: dict[tuple[object, ...], int] = {}

    def of(self, info: ModuleInfo) -> int:
        """Return the number of a module in the spool, defining it (and its root) on first sight."""
        if not info.definition:
            root = info.root
            if root is not None and not root.definition:
                self._define_root(root)
            fields: dict[str, object] = {
                "root": root.definition if root is not None else 0,
                "path": info.path,
                "raw_path": info.raw_path,
                "class": info.class_name,
                "wrappers": info.wrappers,
                "opaque": info.is_opaque,
            }
            known = root.definitions if root is not None else self._rootless
            kind = tuple(fields.values())  # known of a module that this one has replaced
            if len(known) >= _MOST_DEFINITIONS:
                known.clear()
            if kind not in known:
                known[kind] = self._recorder.define("module", **fields)
            info.definition = known[kind]
        return info.definition

    def _define_root(self, root: Root) -> None:
        root.definition = self._recorder.define(
            "root",
            **{"class": root.class_name},
            parameters=root.parameter_count,
            preferred=root.is_preferred,
        )

    def write_root(self, root: Root) -> None:
        """Define every module of a root, and which roots were found inside others."""
        for each, _ in self.table.of_root(root):
            self.of(each)
        self.write_contained()

    def write_contained(self) -> None:
        """Write down which roots were found inside others since the last time."""
        for inner, outer, path in self.table.contained:
            for each in (inner, outer):
                if not each.definition:  # it was named before any call of it
                    self._define_root(each)
            self._recorder.define(
                "inside", root=inner.definition, **{"in": outer.definition}, path=path
            )
        self.table.contained.clear()
