"""docs/trace-format.md, held to what is written."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest
from safetensors.numpy import load_file

from rankscope.record.notes import NoteKind
from rankscope.tree.build import build
from rankscope.tree.columns import map_columns
from tests import forked
from tests.conftest import REPOSITORY
from tests.record.test_notes import NOTES
from tests.stepwise.growing import grown
from tests.stepwise.test_paper_jobs import job
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


def test_the_pages_program_reads_a_trace_without_rankscope(folder):
    program, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    run = forked.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "fc output [0 2 1 3]" in run.stdout


def test_the_pages_second_program_opens_a_full_tensor_without_rankscope(tmp_path):
    import torch

    import rankscope

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(3, 2)])})
    model.forward = lambda x: model["layers"][0](x)
    x = torch.ones(1, 3)
    with rankscope.trace(model, out=tmp_path / "trace", tensors="layers.0:output"):
        output = model(x)
    _, program, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    run = forked.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert run.stdout.strip() == str(output.detach())


def test_the_pages_third_program_joins_the_columns_of_a_tree_that_grew(tmp_path):
    out = job(tmp_path)
    for _ in grown(out, tmp_path / "work", pieces=9):
        pass
    build(tmp_path / "work")
    (tmp_path / "work").rename(tmp_path / "over")
    out.rename(tmp_path / "records")
    (tmp_path / "over").rename(tmp_path / "trace")
    index = json.loads((tmp_path / "trace/trace.json").read_text())["storage"]["values"]
    _, _, program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    run = forked.run(
        [sys.executable, "-c", f"{program}\nprint(len(columns['values.rank']))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert int(run.stdout) == sum(part["values"] for part in index) > 0
    read_valid(tmp_path / "trace")


def test_every_column_of_the_file_is_explained_and_the_other_way_round(folder):
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    explained = set(re.findall(r"`((?:values|calls|samples)\.\w+)`", table))
    assert explained == set(load_file(folder / "trace" / "values.safetensors"))


def test_every_kind_of_note_and_its_fields_stand_on_the_page():
    facts = PAGE.partition("### Facts")[2].partition("## Nodes")[0]
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
    path = folder / "trace" / "values.safetensors"
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


def test_a_small_trace_is_written_as_it_always_was(folder):
    """The golden file changes only with a reason: delete it, run twice, read the difference."""
    trace = read_valid(folder / "trace")
    if not GOLDEN.exists():
        GOLDEN.write_text((folder / "trace" / "trace.json").read_text())
        pytest.fail("golden.json was written anew: read the difference, then commit it")
    same(json.loads(GOLDEN.read_text()), trace)
