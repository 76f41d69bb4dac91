"""The house rules that a machine can check: who may import whom, what imports cost, what
is public.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rankscope

SOURCE = Path(rankscope.__file__).parent
LAUNCHER = SOURCE.parent.parent / "launcher"
ROOMS = {
    "errors": set(),
    "globs": set(),
    "layout": {"errors", "globs"},
    "record": {"errors", "layout"},
    "settings": {"errors", "globs", "layout", "record"},
    "run": {"errors", "record", "settings"},
    "spool": {"errors", "record", "run"},
    "spool.chunks": {"errors", "record", "run"},
    "capture": {"errors", "layout", "record", "run"},
    "agent": {
        *("errors", "globs", "layout", "record", "settings", "run"),
        *("spool", "spool.chunks", "capture", "words"),
    },
    "tree.assembly": {"errors", "layout", "record", "run", "spool", "spool.chunks"},
    "tree": {
        "errors",
        "globs",
        "layout",
        "record",
        "run",
        "spool",
        "spool.chunks",
        "tree.assembly",
    },
    "words": {"record", "run", "tree"},
    "tree.tensors": {"errors", "globs", "layout", "record", "run", "spool.chunks", "tree"},
    "diagnosis": {
        "errors",
        "globs",
        "layout",
        "record",
        "run",
        "tree.assembly",
        "tree",
        "tree.tensors",
    },
    "words.page": {"errors", "globs", "layout", "record", "run", "tree", "diagnosis", "words"},
    "export": {"errors", "globs", "layout", "record", "run", "tree"},
    "companion": {
        *("errors", "record", "settings", "run", "spool", "spool.chunks", "tree.assembly", "tree"),
        *("diagnosis", "export", "words"),
    },
    "doctor": {"errors", "record", "settings", "run", "companion", "agent", "capture", "tree"},
    "block": {
        *("errors", "record", "settings", "run", "spool", "spool.chunks"),
        *("capture", "agent", "tree.assembly", "tree"),
    },
    "compat": {
        *(
            "errors",
            "layout",
            "record",
            "run",
            "spool",
            "spool.chunks",
            "capture",
            "agent",
            "block",
        ),
        *("tree.assembly", "tree", "tree.tensors", "export"),
    },
    "cli": {
        *("errors", "globs", "layout", "record", "settings", "run", "companion", "tree.assembly"),
        *("tree", "tree.tensors", "diagnosis", "export", "doctor", "words.page", "compat", "words"),
    },
    "testing": {"errors", "record", "tree", "diagnosis", "words"},
    "replaying": {
        *("errors", "layout", "record", "capture", "agent", "tree", "tree.tensors", "diagnosis"),
    },
    "tracing": {"errors", "settings", "agent", "block", "tree", "tree.tensors"},
    "report": {"errors", "layout", "record", "tree", "diagnosis", "words.page", "words"},
    "integrations": {"record", "agent", "diagnosis", "tracing", "words"},
    "__init__": {"tracing", "tree", "diagnosis", "replaying"},
    "__main__": {"cli"},
}
"""Room -> the rooms it may import from: data flows one way. Every room stands below those that it
imports from, so no circle can close."""
FOREIGN = {
    "torch": {"capture", "agent", "block", "compat", "tracing", "replaying"},
    "zmq": {"companion"},
    "typer": {"cli"},
    "triton": {"capture"},
}
"""Package -> the only rooms that may know it."""
ONE_FILE = {
    "pyarrow": "export/parquet.py",
    "prometheus_client": "companion/metrics.py",
    "transformers": "integrations/transformers.py",
    "lightning": "integrations/lightning.py",
    "pytorch_lightning": "integrations/lightning.py",
    "torchtitan": "integrations/torchtitan.py",
    "verl": "integrations/verl.py",
}
"""Optional package -> the only file that may import it."""
ALONE = {
    ("tree/tensors/rebuild.py", "torch"),
    ("doctor/scriptprobe.py", "torch"),  # runs in a process of its own, in the place of a script
}
"""Single files of other rooms that may know a package: nothing imports them before a tensor is
asked for (the list below is without torch)."""
LAZY_DOORS = {"rankscope", "rankscope.compat"}
"""Packages that offer public names from all over the house. Each module below them imports them, as
Python does with every package on the way, so a circle is their purpose. It is harmless because they
load a name's module only when the name is used (`rankscope.tracing`, which is there at once, does
the same)."""
FENCES = {"rankscope.capture.torch_internals": "one file for each part of torch, however small"}
"""Packages whose modules keep a dependency apart, and so may be small."""
WITHOUT_TORCH = [
    "rankscope",
    "rankscope.compat",
    "rankscope.cli.app",
    "rankscope.cli.show",
    "rankscope.settings",
    "rankscope.spool.writer",
    "rankscope.companion.collector",
    "rankscope.companion.hostcompanion",
    "rankscope.companion.running.rankstatuses",
    "rankscope.cli.top",
    "rankscope.doctor.job",
    "rankscope.tree.build",
    "rankscope.tree.reader",
    "rankscope.export.formats",
    "rankscope.export.perfetto",
    "rankscope.layout.plan",
    "rankscope.layout.infer",
    "rankscope.layout.infer",
    "rankscope.layout.plan",
    "rankscope.layout.layoutfile",
    "rankscope.layout.layoutfile",
    "rankscope.cli.tensor",
    "rankscope.tree.tensors.globalvalues",
    "rankscope.diagnosis.check",
    "rankscope.cli.check",
    "rankscope.diagnosis.comparison.diff",
    "rankscope.testing",
    "rankscope.report",
]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room of a module: the longest of the names on its way that `ROOMS` lists."""
    names = module.split(".")[1:]
    return next(
        (room for size in (2, 1) if (room := ".".join(names[:size])) in ROOMS),
        (*names, "__init__")[0],
    )


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import, inside functions and for type checking too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""


def for_types_alone(path: Path) -> set[int]:
    """Return the lines that stand under `if TYPE_CHECKING`, which load nothing."""
    return {
        inner.lineno
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in node.body
    }


MODULES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_import_goes_against_the_flow(path: Path) -> None:
    room = room_of(module_name(path))
    unloaded = for_types_alone(path)
    for line, module in imports(path):
        top, _, rest = module.partition(".")
        is_alone = (path.relative_to(SOURCE).as_posix(), top) in ALONE
        if top in FOREIGN and line not in unloaded and not is_alone:
            assert room in FOREIGN[top], f"{path}:{line}: {room} must not know {top}"
        if top in ONE_FILE:
            assert str(path.relative_to(SOURCE)) == ONE_FILE[top], f"{path}:{line}: {top}"
        if top == "rankscope" and rest:
            target = room_of(module)
            allowed = target == room or target in ROOMS[room]
            assert allowed, f"{path}:{line}: {room} imports {target}"


def test_no_rooms_import_each_other_in_a_circle() -> None:
    below: dict[str, int] = {}
    while len(below) < len(ROOMS):
        free = [r for r, needs in ROOMS.items() if r not in below and needs <= below.keys()]
        assert free, f"a circle among {sorted(ROOMS.keys() - below.keys())}"
        below |= dict.fromkeys(free, len(below))


def imported(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it, and the packages on the way."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:size]) for size in range(1, len(parts) + 1))


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not inside functions or for types alone: modules that name each other's types cannot be
    read, tested or changed one without the other."""
    known = {module_name(path): path for path in MODULES}
    graph = {
        name: {other for other in imported(path) if other in known} - LAZY_DOORS - {name}
        for name, path in known.items()
        if name not in LAZY_DOORS
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(reversed(error.args[1]))}")


def test_a_small_module_that_one_other_imports_is_part_of_it() -> None:
    """A thought that needs no file of its own is read faster where it is used."""
    importers: dict[str, set[Path]] = {}
    for path in [*MODULES, *LAUNCHER.rglob("*.py")]:
        for name in imported(path):
            importers.setdefault(name, set()).add(path)
    small = [
        name
        for name, path in ((module_name(path), path) for path in MODULES)
        if len(path.read_text().splitlines()) < 70
        and path.name != "__init__.py"
        and len(importers.get(name, set()) - {path}) == 1
        and name.rpartition(".")[0] not in FENCES
    ]
    assert not small


CUT_OFF = {
    "rankscope.agent.blackboxwatch": "what a rank sees happen in its values; `join` opens the run",
    "rankscope.agent.firstrank": "what the first rank of a host alone does, before any joins",
    "rankscope.capture.device.fusedkernels": "imports Triton, and is a source that is compiled",
    "rankscope.cli.trees": "the tree as lines, in two ways; the screen around it is another",
    "rankscope.cli.topdata": "the JSON data of `top`; its screen is another thought",
    "rankscope.companion.collector": "one of two sources of streams, behind one protocol",
    "rankscope.companion.links": "the two ways to send, as the relay's loop sees them",
    "rankscope.companion.metrics": "imports an optional package, loaded only where asked for",
    "rankscope.companion.running.rankstatuses": "a listener of the reader, as `stepjudge` is one",
    "rankscope.companion.running.stepjudge": "a listener of the reader, as `rankstatuses` is one",
    "rankscope.diagnosis.comparison.findings": "differences as findings, a step of its own",
    "rankscope.diagnosis.comparison.origins": "where differences begin, a step of its own",
    "rankscope.diagnosis.comparison.wholedistances": "distances of wholes, a step of its own",
    "rankscope.diagnosis.history": "what earlier steps say, in one written order of functions",
    "rankscope.diagnosis.rules.hangs": "who is missing; with crashes it would pass 700 lines",
    "rankscope.diagnosis.unreduced": "one kind of fault with its own evidence",
}
"""Module that one other of its folder alone imports -> why it is a file of its own."""


def test_what_one_module_imports_lies_with_it_or_has_a_reason() -> None:
    names = {module_name(path): path for path in MODULES}
    importers: dict[str, set[str]] = {}
    for path in [*MODULES, *LAUNCHER.rglob("*.py")]:
        importer = module_name(path) if path in MODULES else str(path)
        for name in {*imported(path)} & names.keys() - {importer}:
            importers.setdefault(name, set()).add(importer)
    cut_off = {
        name
        for name, importing in importers.items()
        if len(importing) == 1
        and names[name].name not in ("__init__.py", "__main__.py")
        and name.rpartition(".")[0] == next(iter(importing)).rpartition(".")[0]
    }
    assert cut_off <= CUT_OFF.keys(), cut_off - CUT_OFF.keys()
    assert len(cut_off) <= 15, cut_off
    assert len(MODULES) <= 260, "a file is a concept, of 150 to 500 lines"


def test_no_two_classes_have_one_name() -> None:
    """One noun, one class; private ones count, because readers search for them too."""
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(module_name(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_settings_are_read_without_torch() -> None:
    assert all("torch" not in module for _, module in imports(SOURCE / "settings.py"))


def test_importing_anything_outside_the_ranks_loads_neither_torch_nor_more_than_it_needs() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    bare = "import rankscope, sys; assert not {'numpy', 'torch', 'zmq'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", bare], check=True, timeout=300)


def test_the_public_names_are_these() -> None:
    assert rankscope.__all__ == [
        *("Trace", "attach", "check", "diff", "open_trace", "replay", "report", "step", "trace"),
    ]
    assert rankscope.__all__ == sorted(rankscope.__all__)
    public = {name: getattr(rankscope, name) for name in rankscope.__all__}
    assert all(callable(found) for name, found in public.items() if name != "report")
    assert rankscope.report.__all__ == ["fragment", "to", "write"], "a module of its own"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rankscope.nothing  # noqa: B018


def test_broad_excepts_are_few_and_give_their_reason() -> None:
    found = []
    for path in MODULES:
        lines = path.read_text().splitlines()
        found += [
            f"{path.name}:{number}: {line.strip()}"
            for number, line in enumerate(lines, 1)
            if line.strip().startswith(("except Exception", "except BaseException", "except:"))
        ]
    assert len(found) <= 6, found
    assert all("#" in line for line in found), found


def test_a_placement_is_parsed_once_for_each_source_of_its_text() -> None:
    # a layout file, the ranks' records, a tree and older ones: others are handed placements
    readers = {
        *("layout/layoutfile.py", "tree/assembly/interning.py"),
        *("tree/slotview.py", "tree/older.py"),
    }  # fmt: skip
    calling = {
        path.relative_to(SOURCE).as_posix()
        for path in MODULES
        if "parse_placement(" in path.read_text().replace("def parse_placement(", "")
    }
    assert calling == readers


def test_one_module_writes_and_parses_safetensors_headers() -> None:
    knowing = [
        path.relative_to(SOURCE).as_posix()
        for path in MODULES
        if "data_offsets" in path.read_text() or "__metadata__" in path.read_text()
    ]
    assert knowing == ["spool/chunks/safetensors.py"]


@functools.cache
def callers() -> dict[str, set[str]]:
    """Return the functions and methods of the package by the last name of what they call."""
    of_name: dict[str, set[str]] = {}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                for call in ast.walk(node):
                    if isinstance(call, ast.Call):
                        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                        place = f"{path.relative_to(SOURCE).as_posix()}:{node.name}"
                        of_name.setdefault(name, set()).add(place)
    return of_name


def calling(name: str) -> set[str]:
    """Return the functions and methods of the package that call something of this name."""
    return callers().get(name, set())


def test_one_function_opens_step_files_and_one_writes_them() -> None:
    """What is checked when a file is opened, and what it may lack, is known in one place."""
    assert calling("MappedFile") == {
        "tree/stepfile.py:map_columns",
        "spool/chunks/chunkfiles.py:read_header",  # of full tensors
        "compat/debugger/filetrace.py:find",  # a tensor that a debugger wrote
    }
    assert {each.partition(":")[0] for each in calling("map_columns")} == {
        "tree/stepfile.py",
        "tree/older.py",  # formats 1 and 2 had a columns file of another name
    }
    assert calling("write_arrays") == {"tree/stepfile.py:write_steps"}
    assert not calling("safe_open") | calling("load_file") | calling("save_file")


def test_one_reader_follows_the_records_of_a_running_job() -> None:
    """Others read its status, what it found, and finished steps; the assembly reads once."""
    decoding = {
        path.relative_to(SOURCE).as_posix()
        for path in MODULES
        if room_of(module_name(path)) not in {"spool", "tree.assembly"}
        and {"records", "records_at"}
        & {
            alias.name
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.ImportFrom) and node.module == "rankscope.spool.recordcolumns"
            for alias in node.names
        }
    }
    assert decoding == {
        "companion/running/splitstream.py",  # as they grow; of a host that stands still, once
        "companion/heldstream.py",  # which of those that a black box holds it keeps
    }
    assert calling("RunningJob") == {"companion/running/__main__.py:main"}


def test_rules_and_exports_read_a_tree_through_its_typed_views() -> None:
    for path in MODULES:
        if room_of(module_name(path)) in {"diagnosis", "tree.tensors", "export"}:
            raw = [line for line in path.read_text().splitlines() if ".data[" in line]
            assert not raw, f"{path}: {raw}"


def test_commands_print_in_one_way() -> None:
    """Every line passes `cli/terminal.py`, which lets no text of a file order a terminal about; the
    screen of `top` moves the cursor itself, and `app.py` says what went wrong before all else."""
    for path in sorted((SOURCE / "cli").glob("*.py")):
        if path.name not in ("top.py", "app.py", "terminal.py"):
            text = path.read_text()
            for word in ("typer.echo", "stdout.write", "stderr.write", "print("):
                assert f" {word}" not in text, f"{path}: {word}: use rankscope.cli.terminal.echo"


def test_private_names_of_torch_stand_in_one_folder() -> None:
    theirs = SOURCE / "capture" / "torch_internals"
    assert any("torch._C" in path.read_text() for path in theirs.glob("*.py"))
    for path in MODULES:
        if path.parent != theirs:
            text = path.read_text()
            assert "torch._C" not in text, path
            assert "torch._dynamo" not in text.replace('"torch._dynamo', ""), path


EMPTY_NAMES = re.compile(
    r"_*(?:found|each|own|held|known|given|others?|left|same|whole|kept|made|told|said|one|taken|"
    r"both|most|rest|what|how|who|apart|alike|every|wanted|shown|seen|put|met|mine|ours|theirs)_*"
)
"""Pronouns and participles: a reader has to look up what such a name stands for."""
TRANSLATED = re.compile(
    r"\bof wh(?:ich|om|ose)\b|\b(?:he|himself|his)\b|\banew\b|\bbeforehand\b|\bis none\b|"
    r"\bis not one\b|\b(?:are|is) said of\b|\b(?:told|known) of\b|\bso much as\b|"
    r"\bwhat (?:it|they) (?:has|have|holds?|lacks?)\b"
)
"""Turns of phrase that English has other words for."""


def test_few_names_are_pronouns_or_participles() -> None:
    """Where it fails, name the thing: `matches`, `replica_values`, the singular of the loop."""
    count, empty = 0, []
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                names = {arg.arg for arg in ast.walk(node) if isinstance(arg, ast.arg)}
                names |= {
                    name.id
                    for name in ast.walk(node)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                }
                count += len(names)
                empty += [
                    f"{module_name(path)}.{node.name}: {name}"
                    for name in names
                    if EMPTY_NAMES.fullmatch(name)
                ]
    assert len(empty) < 0.003 * count, empty


def test_few_sentences_read_as_translated() -> None:
    stumbling = [
        f"{module_name(path)}:{node.lineno}: {match.group()}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if (match := TRANSLATED.search(" ".join(node.value.split())))
    ]
    assert len(stumbling) < 30, stumbling


def test_the_suite_stays_small() -> None:
    """What takes long or proves rarer cases lies in tests/lab; networks lie in tests/models.py."""
    tests = Path(__file__).parent
    paths = [path for path in tests.rglob("*.py") if tests / "lab" not in path.parents]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= 48_000
    networks = [
        f"{path.name}:{node.lineno}: {node.name}"
        for path in paths
        if path != tests / "models.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base) in {"nn.Module", "torch.nn.Module"} for base in node.bases)
    ]
    assert len(networks) <= 130, networks
