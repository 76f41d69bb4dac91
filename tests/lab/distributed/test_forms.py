"""Notes on how calls were nested differ by rank, and disturb nobody who reads values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rankscope.diagnosis.check import check
from rankscope.record.finding import Verdict
from rankscope.record.value import is_form
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from tests.cli.test_commands import rankscope as command
from tests.distributed.pool import RankPool
from tests.lab.distributed import forms_job as job

Key = tuple[str, str, int]


@pytest.fixture(scope="module", params=["ddp", "tp"])
def pair(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trace, Trace]:
    """One job traced without full tensors, and with all of them."""
    folder = tmp_path_factory.mktemp(request.param)
    for name, tensors in (("without", ""), ("with", "**")):
        out = str(folder / name)
        ranks.run(job.train, request.param, out, tensors, world_size=2)
    return open_trace(folder / "without"), open_trace(folder / "with")


def test_check_finds_nothing_in_them_and_compares_what_it_compared_without(
    pair: tuple[Trace, Trace],
) -> None:
    without, kept = pair
    forms = [
        slot
        for step in kept.steps
        for node in step.walk()
        for slot in node.slots
        if is_form(slot.slot)
    ]
    assert any(len(form.folds) > 1 for form in forms), "the ranks' notes differ"
    reports = [check(trace) for trace in pair]
    assert [report.verdict for report in reports] == [Verdict.CLEAN] * 2
    assert reports[0].compared == reports[1].compared > 10
    assert reports[0].skipped == reports[1].skipped
    assert not any(is_form(s.slot) for st in without.steps for n in st.walk() for s in n.slots)


def test_show_prints_them_only_where_they_are_named(
    pair: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    without, kept = (trace.path for trace in pair)
    for options in ([], ["--full"], ["--slots", "*"], ["--slots", "*put*"], ["--slots", "none"]):
        code, text, _ = command("show", kept, *options)
        assert (code, "form:" in text) == (0, False), options
    code, text, _ = command("show", kept, "--slots", "form:*", "--step", "1")
    lines = [line.strip() for line in text.splitlines() if "form:" in line]
    assert code == 0
    assert lines
    assert any(line.startswith('form:input = {"args":') for line in lines)
    _, text, _ = command("show", kept, "--slots", "form:input", "--rank", "1")
    assert "rank 1" in text.split("form:input = ")[1].splitlines()[0]
    assert command("show", without, "--slots", "form:*")[0] == 2


def test_exports_and_lists_of_tensors_are_without_them(
    pair: tuple[Trace, Trace], tmp_path: Path
) -> None:
    keys: list[list[Key]] = []
    for number, trace in enumerate(pair):
        out = tmp_path / f"{number}.jsonl"
        code, _, errors = command("export", trace.path, "--format", "jsonl", "--out", out)
        assert code == 0, errors
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        keys.append([(line["node"], line["slot"], line["rank"]) for line in lines])
    assert sorted(keys[0]) == sorted(keys[1])
    code, text, errors = command("tensor", pair[1].path)
    assert code == 0, errors
    assert "output" in text
    assert "form:" not in text
    saved = tmp_path / "rank0.safetensors"
    code, _, errors = command("tensor", pair[1].path, "**:*", "--rank", "0", "--out", saved)
    assert code == 0, errors
    names = load_file(saved).keys()
    assert any(name.endswith(":output") for name in names)
    assert not any("form:" in name for name in names)


def test_show_says_what_a_collective_is_within_the_width_of_the_terminal(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "trace"
    ranks.run(job.talk, str(out), world_size=2)
    code, text, errors = command("show", out, "--full")
    assert code == 0, errors
    heads = [line.strip() for line in text.splitlines() if "  collective  " in line]
    told = [line.split("  collective  ")[1].split("  ") for line in heads]
    assert ["all_reduce(sum) over 0-1"] in [parts[:1] for parts in told]
    assert ["all_reduce(max) over 0-1", "async"] in [parts[:2] for parts in told]
    assert ["broadcast from 1 over 0-1"] in [parts[:1] for parts in told]
    lines = [line.strip() for line in text.splitlines()]
    assert "rank 0  send to 1 over 0-1" in lines
    assert "rank 1  recv from 0 over 0-1" in lines
    monkeypatch.setenv("COLUMNS", "40")
    narrow = command("show", out, "--phase", "collective", "--slots", "none")[1]
    assert max(map(len, narrow.splitlines()[1:])) <= 40
    assert "all_reduce(max) over 0-1" in narrow
