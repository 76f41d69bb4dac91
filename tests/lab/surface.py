"""`python -m tests.lab.surface --accept`: write down what people's programs and scripts rest on.

The names that docs/questions.md calls public with what they take and give, the exceptions, the
commands with their options, the settings with their variables and defaults, and the entry points.
tests/lab/test_surface.py holds the package to what stands in surface.json; sources are read, not
imported, because an integration needs the framework that it is of.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import typer

from rankscope.cli.app import app
from rankscope.settings import SETTINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("surface.json")
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
MODULES = (
    "rankscope",
    "rankscope.compat",
    "rankscope.errors",
    "rankscope.integrations.lightning",
    "rankscope.integrations.torchtitan",
    "rankscope.integrations.transformers",
    "rankscope.integrations.verl",
    "rankscope.report",
    "rankscope.testing",
)


def surface() -> dict[str, str]:
    """Return everything that is public, by its name, with its signature or its meaning."""
    return dict(sorted([*_names(), *_options(), *_settings(), *_entry_points()]))


def _names() -> Iterator[tuple[str, str]]:
    for module in MODULES:
        tree = _parsed(module)
        homes = {
            alias.asname or alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        for name in _public(tree):
            home = homes.get(name, module)
            yield f"{module}.{name}", ""
            own = tree if home == module else _parsed(home)
            for path, text in _signatures(own, name):
                yield f"{module}.{path}", text


def _parsed(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return ast.parse(Path(spec.origin).read_text())


def _public(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]


def _signatures(tree: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    """Yield what a function takes and gives, and of a class its public members and fields."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            is_property = any(ast.unparse(d).endswith("property") for d in node.decorator_list)
            gives = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            yield name, gives if is_property else f"({ast.unparse(node.args)}){gives}"
        elif isinstance(node, ast.ClassDef) and node.name == name:
            yield name, f"class({', '.join(map(ast.unparse, node.bases))})"
            for member in node.body:
                own = ""
                if isinstance(member, ast.FunctionDef | ast.ClassDef):
                    own = member.name
                elif isinstance(member, ast.AnnAssign):
                    own = ast.unparse(member.target)
                    if own[0] != "_":
                        yield f"{name}.{own}", ast.unparse(member.annotation)
                if own == "__init__" or (own and own[0] != "_"):
                    for path, text in _signatures(node, own):
                        yield f"{name}.{path}", text


def _options() -> Iterator[tuple[str, str]]:
    every = typer.main.get_command(app)
    for name in every.list_commands(None):
        command = every.get_command(None, name)
        yield f"rankscope {name}", ""
        for parameter in command.params:
            kind = "" if getattr(parameter, "is_flag", False) else " VALUE"
            for word in (*parameter.opts, *parameter.secondary_opts):
                if word.startswith("-"):
                    yield f"rankscope {name} {word}", f"option{kind}"
                else:
                    yield f"rankscope {name} {word.upper()}", f"argument, {parameter.nargs} of them"


def _settings() -> Iterator[tuple[str, str]]:
    for setting in SETTINGS:
        yield f"--rs-{setting.name}", f"{setting.metavar}, default {setting.default!r}"
        yield setting.variable, f"--rs-{setting.name}"


def _entry_points() -> Iterator[tuple[str, str]]:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    for name, place in project["scripts"].items():
        yield f"program {name}", place
    for group, entries in project["entry-points"].items():
        for name, place in entries.items():
            yield f"entry point {group} {name}", place


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.surface",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--accept", action="store_true", help="write down what is public now")
    if not parser.parse_args().accept:
        print(json.dumps(surface(), indent=1))
    else:
        FILE.write_text(json.dumps(surface(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
