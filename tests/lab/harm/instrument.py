"""Rankscope's own modules, compiled so that any function and any call in them can be made to fail.

Every function gets a check at its entry, every call one before it is made. A check compares one
number, so a process in which nothing fails runs as ever; a fork of it in which `FAULT.at` is the
number of a site fails there. Nothing is replaced: the code that runs is the source of the package.
"""

from __future__ import annotations

import ast
import errno
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

__all__ = ["FAULT", "HOWS", "PACKAGES", "SITES", "Site", "instrument"]

_NAME = "__fault__"
HOWS = ("raise", "raise once", "hang", "nonsense")
_HANG_S = 1.0
PACKAGES = ("rankscope", "rankscope_launcher")
_IO_OWNERS = frozenset({"os", "shutil", "fcntl", "mmap", "socket", "subprocess", "tempfile"})
_IO_NAMES = frozenset(
    {
        *("open", "mkdir", "unlink", "rmdir", "stat", "lstat", "iterdir", "exists", "is_dir"),
        *("touch", "truncate", "write", "read", "flush", "close", "fileno", "cwd", "absolute"),
        *("read_bytes", "read_text", "write_bytes", "write_text", "glob", "rmtree", "resolve"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place in the source where something can be made to fail."""

    number: int
    module: str
    function: str
    line: int
    kind: str
    """"function" (its entry), "io" (a call of the operating system) or "call" (any other)."""
    text: str
    """The source of a call."""

    def __str__(self) -> str:
        what = f": {self.text}" if self.text else ""
        return f"{self.module}:{self.line} {self.function} ({self.kind}{what})"


SITES: dict[int, Site] = {}


class _Watched:
    """Stands in `FAULT.at` while sites are noted: equal to none, and asked by each."""

    def __init__(self) -> None:
        self.seen: dict[int, None] = {}

    def __eq__(self, number: object) -> bool:
        self.seen[number] = None  # type: ignore[index]
        return False

    def __ne__(self, number: object) -> bool:
        self.seen[number] = None  # type: ignore[index]
        return True

    __hash__ = None  # type: ignore[assignment]


class Fault:
    """What fails in this process, and how."""

    def __init__(self) -> None:
        self.at: Any = -1
        self.how = ""
        self.fired = 0

    def set(self, number: int, how: str) -> None:
        """Have one site fail from now on."""
        self.at, self.how, self.fired = number, how, 0

    def watch(self) -> _Watched:
        """Note the sites that are passed from now on."""
        self.at = _Watched()
        return self.at

    def fire(self) -> bool:
        """Fail; return True where nonsense is to be returned in place of the work."""
        self.fired += 1
        is_first = self.fired == 1
        if self.how == "raise" or (self.how == "raise once" and is_first):
            if SITES[self.at].kind == "io":
                raise OSError(errno.ENOSPC, "injected: no space left on device")
            raise RuntimeError("injected")
        if self.how == "hang" and is_first:
            time.sleep(_HANG_S)
        return self.how == "nonsense"

    nonsense = ("nonsense", -1, None)


FAULT = Fault()


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source)
        tree = _Transformer(fullname).visit(tree)
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _NAME, FAULT)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def instrument() -> None:
    """Have every module of rankscope that is imported from now on compiled with its sites."""
    loaded = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
    if loaded:
        raise RuntimeError(f"loaded already: {loaded[:3]}")
    sys.meta_path.insert(0, _Finder())


class _Transformer(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self._module = module
        self._functions: list[str] = []

    def _site(self, node: ast.AST, kind: str, text: str = "") -> ast.Constant:
        number = len(SITES)
        SITES[number] = Site(
            number=number,
            module=self._module,
            function=".".join(self._functions),
            line=node.lineno,  # type: ignore[attr-defined]
            kind=kind,
            text=text,
        )
        return ast.Constant(number)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._functions.append(node.name)
        found = self.generic_visit(node)
        self._functions.pop()
        return found

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.args = self.visit(node.args)
        self._functions.append(node.name)
        check = ast.If(
            test=_compared(ast.Eq(), self._site(node, "function")),
            body=[
                ast.If(
                    test=_asked("fire"),
                    body=[ast.Return(value=_attribute("nonsense"))],
                    orelse=[],
                )
            ],
            orelse=[],
        )
        node.body = [self.visit(statement) for statement in node.body]
        has_docstring = ast.get_docstring(node, clean=False) is not None
        node.body.insert(1 if has_docstring else 0, check)
        self._functions.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._functions.append("<lambda>")
        site = self._site(node, "function")
        node.body = ast.IfExp(
            test=ast.BoolOp(op=ast.And(), values=[_compared(ast.Eq(), site), _asked("fire")]),
            body=_attribute("nonsense"),
            orelse=self.visit(node.body),
        )
        self._functions.pop()
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        found = self.generic_visit(node)
        if not self._functions or _is_super(node):  # at import, or bound to the frame
            return found
        text = ast.unparse(node.func)
        site = self._site(node, "io" if _is_io(node.func) else "call", text[:60])
        return ast.IfExp(
            test=ast.BoolOp(
                op=ast.Or(),
                values=[
                    _compared(ast.NotEq(), site),
                    ast.UnaryOp(op=ast.Not(), operand=_asked("fire")),
                ],
            ),
            body=found,
            orelse=_attribute("nonsense"),
        )


def _is_super(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id in {"super", "locals"}


def _is_io(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in {"open", "map_file"}
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    is_module = isinstance(owner, ast.Name) and owner.id in _IO_OWNERS
    return (is_module and function.attr[0] != "_") or function.attr in _IO_NAMES


def _attribute(name: str) -> ast.expr:
    return ast.Attribute(value=ast.Name(id=_NAME, ctx=ast.Load()), attr=name, ctx=ast.Load())


def _asked(name: str) -> ast.expr:
    return ast.Call(func=_attribute(name), args=[], keywords=[])


def _compared(how: ast.cmpop, number: ast.Constant) -> ast.expr:
    return ast.Compare(left=_attribute("at"), ops=[how], comparators=[number])
