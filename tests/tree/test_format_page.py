"""docs/trace-format.md, held to what is written."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from rankscope.record.call import CallStatus
from rankscope.record.notes import NoteKind
from rankscope.record.stepcolumns import COLUMNS, TABLES
from rankscope.record.value import UNFOLDED_FLAGS, ValueFlag
from rankscope.run.folders import (
    INDEX_FORMAT,
    INDEX_NAME,
    STEPS_FOLDER,
    STEPS_FORMAT,
    TRACE_FORMAT,
    TRACE_NAME,
    TREE_FORMAT,
    TREE_NAME,
)
from rankscope.settings import SETTINGS
from rankscope.tree.build import TREE_LIMIT_BYTES, build
from rankscope.tree.stepfile import map_columns
from tests import forked
from tests.companion.running.growing import grown
from tests.companion.running.test_paper_jobs import job
from tests.conftest import REPOSITORY
from tests.record.test_notes import NOTES
from tests.tree.columntable import SCHEMA, schema_text, table_in, tables
from tests.tree.jobs import grid_job, read_valid, validator

PAGE = (REPOSITORY / "docs" / "trace-format.md").read_text()
EXAMPLES = re.findall(r"<!-- schema: (\w+) -->\n```json\n(.*?)```", PAGE, re.DOTALL)
GOLDEN = REPOSITORY / "tests" / "tree" / "golden.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    grid_job(folder / "spools", folder / "trace")
    build(folder / "trace")
    return folder


def test_every_json_of_the_page_says_what_it_shows():
    others = re.findall(r"```json\n\{\"format\": \"rankscope.(\w+)/", PAGE)  # files beside the tree
    assert len(EXAMPLES) + others.count("stalls") + others.count("finding") == PAGE.count("```json")


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_every_json_of_the_page_is_valid(name, text):
    schema = validator().schema
    part = {"$schema": schema["$schema"], "$ref": f"#/$defs/{name}", "$defs": schema["$defs"]}
    type(validator())(part).validate(json.loads(text))


def program(number: int) -> str:
    """One of the two programs of the page."""
    found = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 2
    return str(found[number])


def output_of(text: str, cwd: Path) -> str:
    """Run a program of the page beside a folder `trace`, by a Python that has no rankscope."""
    blocked = "import sys; sys.modules['rankscope'] = None\n"
    run = forked.run(
        [sys.executable, "-c", blocked + text],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return str(run.stdout)


def test_the_pages_program_reads_a_step_with_numpy_alone(folder):
    blocked = "import sys; sys.modules['safetensors'] = None\n"
    printed = output_of(blocked + program(0), folder)
    assert printed.splitlines() == [
        f"{node['phase']} {node['path']} {slot['slot']} {ranks} {means}"
        for node in walked(json.loads((folder / "trace/tree.json").read_text())["steps"][0])
        for slot in node["slots"]
        for ranks, means in [told(slot)]
    ]
    assert "forward fc output [0 2 1 3] [-3." in printed


def walked(step):
    """Nodes, parents first, as columns have them."""
    waiting = step["nodes"][::-1]
    while waiting:
        node = waiting.pop()
        waiting += node["children"][::-1]
        yield node


def told(slot):
    """Ranks of a slot of a tree.json, in the order of its values, and their means, as numpy prints
    them."""
    ranks, means = [], []
    for value in slot["values"]:
        for part in value["ranks"].split(","):
            first, _, last = part.partition("-")
            own = range(int(first), int(last or first) + 1)
            ranks += own
            means += [value["digest"]["mean"]] * len(own)
    return np.array(ranks), np.array(means)


def test_the_pages_second_program_opens_a_full_tensor_without_rankscope(tmp_path):
    import torch

    import rankscope

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(3, 2)])})
    model.forward = lambda x: model["layers"][0](x)
    x = torch.ones(1, 3)
    with rankscope.trace(model, out=tmp_path / "trace", tensors="layers.0:output"):
        output = model(x)
    assert output_of(program(1), tmp_path).strip() == str(output.detach())


def test_lines_of_the_index_name_rows_that_may_be_read_while_the_job_runs(tmp_path):
    out, seen = job(tmp_path / "job"), 0
    for work in grown(out, tmp_path / "work", pieces=9):
        index = work / "steps" / "index.jsonl"
        if not index.exists() or not index.read_bytes():
            continue
        lines = [json.loads(line) for line in index.read_text().splitlines()]
        for line in lines:
            validator().validate(line)
        for entry in (entry for line in lines for entry in line["steps"]):
            first, last = entry["rows"]["values"]
            with safe_open(work / entry["file"], "np") as file:
                assert len(file.get_slice("values.nan")[first:last]) == last - first > 0
            seen += 1
    assert seen, "no step was written while the job ran"
    build(tmp_path / "work")
    read_valid(tmp_path / "work")


def test_the_tables_of_columns_are_those_of_the_code():
    """`python -m tests.tree.columntable` writes them."""
    assert table_in(PAGE) == tables()


def test_the_schema_says_of_columns_and_statistics_what_their_tables_say():
    """`python -m tests.tree.columntable` writes these parts too."""
    assert SCHEMA.read_text() == schema_text()


def test_every_column_of_the_page_is_in_a_step_file_and_the_other_way_round(folder):
    listed = re.findall(r"^\| `(\w+\.\w+)` \| (\w+)", table_in(PAGE), re.MULTILINE)
    assert re.findall(r"^`(\w+)`: ", table_in(PAGE), re.MULTILINE) == [*TABLES]
    path = folder / "trace" / "steps" / "000000.safetensors"
    with safe_open(path, "np") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["format"] == STEPS_FORMAT
    assert dict(listed) == types
    assert [name for name, _ in listed] == [*COLUMNS]


def test_the_page_says_what_the_numbers_in_columns_mean():
    (numbers,) = re.findall(r"^\* `calls\.status`: (.*)\.$", PAGE, re.MULTILINE)
    assert numbers == ", ".join(f"{int(status)} {status.word}" for status in CallStatus)
    (line,) = re.findall(r"^\* `values\.flags`: (.*)$", PAGE, re.MULTILINE)
    bits = [int(bit) for bit in re.findall(r"(?:^the sum of |, )(\d+) ", line)]
    assert sorted(bits) == sorted(int(flag) for flag in ValueFlag if flag)
    (line,) = re.findall(r"bits ([\d, and]+) aside", PAGE)
    assert sum(map(int, re.findall(r"\d+", line))) == int(UNFOLDED_FLAGS)


def test_the_page_names_files_formats_and_the_limit_as_the_code_does():
    for format_ in (TRACE_FORMAT, TREE_FORMAT, STEPS_FORMAT, INDEX_FORMAT):
        assert f'"{format_}"' in PAGE
    assert f"# The trace folder, format {TRACE_FORMAT.partition('/')[2]}\n" in PAGE
    for name in (TRACE_NAME, TREE_NAME, f"{STEPS_FOLDER}/{INDEX_NAME}"):
        assert f"\n  {name} " in PAGE
    assert f"it takes up to {TREE_LIMIT_BYTES >> 20} MB" in PAGE
    (setting,) = (each for each in SETTINGS if each.name == "tree")
    assert setting.metavar == "auto|always|never"
    assert f"`{setting.default}` (the default)" in PAGE


def test_every_kind_of_note_and_its_fields_stand_on_the_page():
    facts = PAGE.partition("\n### Facts\n")[2].partition("\n## ")[0]
    for kind in set(NoteKind) - {NoteKind.TEXT}:
        (line,) = [line for line in facts.splitlines() if f"`{kind.name.lower()}`" in line]
        assert {name for name in NOTES[kind][0] if f"`{name}`" not in line} == set(), kind


def test_every_field_of_the_schema_stands_on_the_page():
    def names(schema):
        if isinstance(schema, dict):
            yield from schema.get("properties", {})
            for part in schema.values():
                yield from names(part)
        elif isinstance(schema, list):
            for part in schema:
                yield from names(part)

    missing = [
        name
        for name in sorted(set(names(validator().schema)))
        if not re.search(rf"\b{name}\b", PAGE)
    ]
    assert missing == []


def test_mapped_columns_are_those_that_safetensors_reads(folder):
    path = folder / "trace" / "steps" / "000000.safetensors"
    mapped, loaded = map_columns(path), load_file(path)
    assert mapped.keys() == loaded.keys()
    for name, column in loaded.items():
        assert mapped[name].dtype == column.dtype
        assert mapped[name].tobytes() == column.tobytes()
        assert not mapped[name].flags.owndata


def same(one, other, where="trace"):
    """Equal up to the last digits of floats."""
    if isinstance(one, float) and isinstance(other, (int, float)):
        assert math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9), where
        return
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for i, (mine, theirs) in enumerate(zip(one, other)):
            same(mine, theirs, f"{where}[{i}]")
    else:
        assert one == other, where


def test_the_tree_of_a_small_trace_is_written_as_it_always_was(folder):
    """The golden file changes only with a reason: delete it, run twice, read the difference."""
    read_valid(folder / "trace")
    if not GOLDEN.exists():
        GOLDEN.write_text((folder / "trace" / "tree.json").read_text())
        pytest.fail("golden.json was written anew: read the difference, then commit it")
    same(json.loads(GOLDEN.read_text()), json.loads((folder / "trace/tree.json").read_text()))
