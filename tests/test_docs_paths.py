"""What the documentation points to is there: files, modules, functions, pages, headings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer

from rankscope.cli.app import COMMANDS, app
from rankscope.settings import SETTINGS
from tests.test_house import ROOMS

HOME = Path(__file__).parents[1]
SOURCE = HOME / "src/rankscope"
PAGES = sorted([HOME / "README.md", HOME / "examples/README.md", *(HOME / "docs").rglob("*.md")])
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?:[\w.-]+/)+[\w-]+\.(?:py|c|json|js|txt|pth|start)")
MODULE = re.compile(r"rankscope(?:\.\w+)+(?!/\d|\w)")
"""Not `rankscope.trace/1`, which is a format."""
NO_MODULES = {
    "rankscope.pth",
    "rankscope.start",
    "rankscope.mode",
    "rankscope.complete",
    "rankscope.left_out",
    "rankscope.verdict",
}
"""Files of the launcher, arguments in a Perfetto trace, a tag in MLflow."""
NAMED_IN_A_FILE = re.compile(r"^\| `(\S+\.py)` \| `([\w.]+)` \|", re.MULTILINE)
BARE = re.compile(r"(?<![\w/.<-])\w+\.py\b")
USERS = {"train.py", "loop.py"}
"""Scripts of the user's in examples."""
OF_A_TRACE = ("steps/", "tensors/rank", "stalls/", "trace/", "spool/rank", "files/")
"""Begins of paths that lie in a folder of the user's, not in this repository."""
CONSOLE = re.compile(r"^ *```console\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"\$ rankscope (\w+)((?: .*)?)$", re.MULTILINE)
OPTION = re.compile(r"(?<=\s)(--[a-z][a-z-]*)")
ids = [page.relative_to(HOME).as_posix() for page in PAGES]


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link} names no heading there"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    places = (HOME, SOURCE, page.parent, HOME / "launcher")
    for code in CODE.findall(prose(page)):
        for name in FILE.findall(code):
            if name.startswith(OF_A_TRACE) or f"/{name}" in code:
                continue
            assert any((place / name).exists() for place in places), f"{page.name}: {name}"


def test_a_file_that_a_page_names_without_its_folder_is_somewhere() -> None:
    """`rebuild.py` alone went stale more easily than `tree/tensors/rebuild.py`."""
    folders = ("src", "tests", "launcher", "examples")
    there = {file.name for folder in folders for file in (HOME / folder).rglob("*.py")}
    for page in PAGES:
        named = {name for code in CODE.findall(prose(page)) for name in BARE.findall(code)}
        assert named <= there | USERS, f"{page.name}: {named - there - USERS}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    for code in CODE.findall(prose(page)):
        for name in set(MODULE.findall(code)) - NO_MODULES:
            assert is_there(name), f"{page.name}: {name}"


def test_the_map_of_the_code_shows_every_room_and_no_other() -> None:
    """A newcomer reads it first; `ROOMS` decides what may import what."""
    page = (HOME / "docs/contributing.md").read_text()
    rooms = set(ROOMS) - {"__init__", "__main__"}
    drawing, _, rest = page[page.index(" training process ") :].partition("```")
    names = re.findall(r"^\* `([\w/]+)(?:/|\.py)`: ", rest.partition("\n## ")[0], re.MULTILINE)
    assert {name.replace("/", ".") for name in names} - {"launcher.rankscope_launcher"} == rooms
    assert {room.rpartition(".")[2] for room in rooms} <= set(re.findall(r"\w+", drawing))


def is_there(dotted: str) -> bool:
    """True for a module of this package, and for a name that a module of it holds."""
    place, rest = SOURCE, dotted.split(".")[1:]
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if rest and (place / f"{rest[0]}.py").is_file():
        file = place / f"{rest.pop(0)}.py"
    else:
        file = place / "__init__.py"
    return not rest or re.search(rf"\b{rest[0]}\b", file.read_text()) is not None


def names_in(file: Path) -> set[str]:
    """Classes, functions and methods of a file, methods as `Class.method`."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found.update(f"{node.name}.{method}" for method in methods)
    return found


def test_the_way_of_one_value_names_functions_that_exist() -> None:
    rows = NAMED_IN_A_FILE.findall((HOME / "docs/how-it-works.md").read_text())
    assert len(rows) > 10
    for file, name in rows:
        assert name in names_in(SOURCE / file), f"how-it-works.md: {file} has no {name}"


def test_the_glossary_explains_classes_that_exist() -> None:
    page = (HOME / "docs/glossary.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page[page.index("## Names in the code") :], re.MULTILINE)
    named = {name for row in rows for name in CODE.findall(row)}
    there = {name for file in SOURCE.rglob("*.py") for name in names_in(file)}
    assert named, "the table of classes is gone"
    assert named <= there, named - there


def test_the_public_api_is_the_one_that_the_modules_offer() -> None:
    page = (HOME / "docs/questions.md").read_text()
    section = page.partition("### What is the public API?")[2].partition("\n###")[0]
    listed = dict(re.findall(r"^\| `(rankscope[\w.]*)` \| (.*) \|$", section, re.MULTILINE))
    assert {"rankscope", "rankscope.compat", "rankscope.report", "rankscope.testing"} < set(listed)
    for module, names in listed.items():
        path = SOURCE.parent.joinpath(*module.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        offered = [
            ast.literal_eval(node.value)
            for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        assert [CODE.findall(names)] == offered, module


def options_of(name: str) -> set[str]:
    """The options of a command, with those of its subcommands."""
    waiting = [typer.main.get_command(app).get_command(None, name)]  # type: ignore[attr-defined]
    options = {f"--rs-{setting.name}" for setting in SETTINGS} if name == "run" else set()
    for command in waiting:
        waiting += getattr(command, "commands", {}).values()
        for parameter in command.params:
            options.update((*parameter.opts, *parameter.secondary_opts))
    return {option for option in options if option.startswith("--")} - {"--help"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_names_every_option(name: str) -> None:
    page = (HOME / f"docs/commands/{name}.md").read_text()
    missing = [option for option in options_of(name) if option not in page]
    assert not missing, f"{name}.md: {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_that_a_page_types_has_these_options(page: Path) -> None:
    """Of `run` those with `--rs-`: all others are torchrun's, or the script's own."""
    for block in CONSOLE.findall(page.read_text()):
        for name, words in TYPED.findall(block.replace("\\\n", " ")):
            assert name in COMMANDS, f"{page.name}: rankscope {name}"
            typed = OPTION.findall(words.partition("#")[0].partition(" --script ")[0])
            if name == "run":
                typed = [option for option in typed if option.startswith("--rs-")]
            assert set(typed) <= options_of(name) | {"--help"}, f"{page.name}: {name}{words}"
