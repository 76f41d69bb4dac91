"""`rankscope check`: the answer first, one JSON object, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import rankscope as package
from rankscope.record.finding import Kind, Verdict
from rankscope.record.notes import Note, NoteKind
from rankscope.record.phases import Phase
from rankscope.tree.build import build
from rankscope.words.reports import report_lines
from tests.cli.test_commands import rankscope
from tests.diagnosis.paper import PAIR, event, module, numbers, setup
from tests.tree.ranks_on_paper import PaperRank

HELD = "held to another rank or run"
ONLY_DIFF = "what all ranks do alike only diff can see"
PAGE = Path(__file__).parents[2] / "docs/commands/check.md"
ROUTER = """axes = "tp=2"
[[layout]]
path = "router"
slot = "param:weight"
placements = { tp = "Replicate()" }
"""


def traced(folder: Path, *, is_faulty: bool, cut: int = 0) -> Path:
    """A job of two ranks; at fault are the router's weights and all that follows."""
    out = folder / "trace"
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        odd = 100 * number * is_faulty
        setup(rank, {"router.weight": numbers(1 + odd)}, mesh=PAIR)
        with rank.call(class_name="Model"):
            module(rank, "fc", numbers(2 + odd), numbers(3 + odd), mesh=PAIR)
        event(rank, Phase.GRADS, "grad", {"router.weight": numbers(4 + odd)}, mesh=PAIR)
        rank.end()
        rank.ship(out, cut=cut)
    build(out)
    return out


def test_the_answer_stands_in_the_first_five_lines(tmp_path: Path):
    code, out, _ = rankscope("check", traced(tmp_path, is_faulty=True))
    assert code == 1
    first = out.splitlines()[:5]
    assert first[0] == (
        f"fault: replica-mismatch, 1 origin (4 of 4 values {HELD}, 0 only to NaN and infinity)"
    )
    assert first[1].startswith("  first: router:param:weight: ranks 0-1 should hold the same")
    assert "rank 0: mean" in first[1] and "rank 1: mean" in first[1]
    assert first[2] == "  where: router  param:weight  ranks 0-1, setup, before train step 0"
    assert first[3] == "  infected: 3 values: fc:input.0, fc:output, router:grad:weight"
    assert first[4].startswith("  look at: The ranks begin with different weights")
    assert "origins" in out
    assert "victims" not in out


def test_all_lists_the_victims_too(tmp_path: Path):
    _, out, _ = rankscope("check", traced(tmp_path, is_faulty=True), "--all")
    assert "victims" in out
    assert "  placement-mismatch  fc  input.0" in out


def test_json_is_one_object_of_the_documented_fields(tmp_path: Path):
    trace = traced(tmp_path, is_faulty=True)
    code, out, _ = rankscope("check", trace, "--json")
    answer = json.loads(out)
    report = answer["result"]
    assert code == 1
    assert list(answer) == ["format", "command", "status", "result", "errors"]
    assert [*answer.values()] == ["rankscope/1", "check", "fault", report, []]
    assert list(report)[:3] == ["verdict", "judged", "compared"] and report["verdict"] == "fault"
    assert [f["origin"] for f in report["findings"]] == [True, False, False, False]
    first = report["findings"][0]
    documented = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert documented is not None
    shown = json.loads(documented[1])
    assert list(answer) == list(shown)
    shown = shown["result"]
    assert list(report) == list(shown)
    assert list(first) == list(shown["findings"][0])
    assert (first["path"], first["slot"], first["ranks"]) == ("router", "param:weight", [0, 1])
    assert first["victims"] == 3


def test_a_job_in_order_is_clean(tmp_path: Path):
    code, out, _ = rankscope("check", traced(tmp_path, is_faulty=False))
    assert code == 0
    assert out.startswith(
        f"no fault found: 4 of 4 values {HELD}, 0 only to NaN and infinity; {ONLY_DIFF}\n"
    )
    report = package.check(package.open_trace(tmp_path / "trace"))
    assert report.verdict is Verdict.CLEAN
    assert not report.findings


def test_what_is_missing_makes_it_incomplete_unless_a_fault_is_there(tmp_path: Path):
    code, out, _ = rankscope("check", traced(tmp_path / "a", is_faulty=False, cut=64))
    assert code == 1
    assert out.startswith("incomplete: no fault in what is here, but records are missing")
    code, out, _ = rankscope("check", traced(tmp_path / "b", is_faulty=True, cut=64))
    assert code == 1
    assert out.startswith("fault")


def test_a_trace_in_which_nothing_could_be_looked_at_is_incomplete(tmp_path: Path):
    rank = PaperRank(tmp_path)
    with rank.call():
        pass
    rank.end()
    rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    code, out, _ = rankscope("check", tmp_path / "trace")
    assert (code, out.splitlines()[0]) == (
        1,
        "incomplete: nothing was judged: no value was recorded: trace again with --rs-digest full "
        f"and --rs-phases all (0 of 0 values {HELD}, 0 only to NaN and infinity)",
    )


def globbed(
    folder: Path, *, globs: tuple[str, ...], inside: bool = False, has_facts: bool = True
) -> Path:
    """Roots that hold a parameter of their own, traced with `--rs-paths` that took nothing."""
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        values = {"scale": numbers(1)} | ({"fc.weight": numbers(2)} if inside else {})
        setup(rank, values)
        for glob in globs:
            note = Note.of(NoteKind.UNMATCHED_GLOB, glob=glob, near="fc")
            said = note if number == 0 or glob != "layers.5" else "something else"
            rank.error(None, said if has_facts else str(said))
        rank.end()
        rank.ship(folder / "trace")
    build(folder / "trace")
    return folder / "trace"


def test_globs_that_matched_nothing_are_never_clean_and_named_with_what_to_do(tmp_path: Path):
    # the root's own parameters are always recorded: they alone are not what was asked for
    code, out, _ = rankscope("check", globbed(tmp_path, globs=("layer.*",)))
    assert code == 1
    first = " ".join(out.split())
    assert first.startswith("incomplete: paths: 'layer.*' matched no module;")
    assert "trace again with globs of whole paths" in first


@pytest.mark.parametrize("has_facts", [True, False])
def test_one_glob_of_several_that_matched_nothing_is_a_note(tmp_path: Path, has_facts: bool):
    globs = ("layer.*", "layers.5")
    trace = globbed(tmp_path, globs=globs, inside=True, has_facts=has_facts)
    code, out, _ = rankscope("check", trace)
    assert code == 0
    assert "note: paths: 'layer.*' matched no module" in out
    assert "layers.5" not in out, "a pipeline stage that lacks a module another one has"


def test_warnings_stand_in_the_first_line(tmp_path: Path):
    for number in range(2):
        rank = PaperRank(tmp_path, number, 2)
        setup(rank, {"fc.weight": numbers(1)}, wrappers=["DDP"])
        module(rank, "", numbers(2), numbers(3))
        rank.end()
        rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    code, out, _ = rankscope("check", tmp_path / "trace")
    assert code == 0
    assert out.splitlines()[0] == (
        f"no fault found: 3 of 3 values {HELD}, 0 only to NaN and infinity; "
        f"1 warning: duplicate-data; {ONLY_DIFF}"
    )


def undeclared(tmp_path: Path) -> Path:
    """Two ranks with one parameter in common, and another, an input and an output that are not."""
    for number in range(2):
        rank = PaperRank(tmp_path, number, 2)
        setup(rank, {"fc.weight": numbers(1), "cut.weight": numbers(50 + number)})
        module(rank, "", numbers(20 + number), numbers(30 + number))
        rank.end()
        rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    return tmp_path / "trace"


def test_values_that_were_held_to_nothing_are_counted_apart_in_the_first_line(tmp_path: Path):
    _, out, _ = rankscope("check", undeclared(tmp_path))
    assert out.splitlines()[0] == (
        f"no fault found: 1 of 4 values {HELD}, 3 only to NaN and infinity; 3 lie in a layout "
        "nobody declared (cut:param:weight, (root):input.0, (root):output): rankscope layout; "
        f"{ONLY_DIFF}"
    )


def test_a_declared_shard_that_nothing_can_be_held_to_is_not_undeclared(tmp_path: Path):
    trace, file = undeclared(tmp_path), tmp_path / "layout.toml"
    file.write_text(
        'axes = "dp=2"\n'
        '[[layout]]\npath = "(root)"\nslot = "*put*"\nplacements = { dp = "Shard(0)" }\n'
        '[[layout]]\npath = "cut"\nslot = "param:*"\nplacements = { dp = "Shard(0)" }\n'
    )
    _, out, _ = rankscope("check", trace, "--layout", file)
    assert out.splitlines()[0] == (  # batches of data-parallel ranks are held to each other
        f"no fault found: 2 of 4 values {HELD}, 2 only to NaN and infinity; {ONLY_DIFF}"
    )


@pytest.mark.parametrize(("part", "expected"), [("0.2", 0), ("25%", 0), ("0.3", 3), ("1", 3)])
def test_too_little_coverage_has_an_exit_code_of_its_own(tmp_path: Path, part: str, expected: int):
    code, out, err = rankscope("check", undeclared(tmp_path), "--require-coverage", part)
    assert code == expected
    assert out.startswith(f"no fault found: 1 of 4 values {HELD}")
    if expected:
        assert f"1 of 4 values were {HELD} (25.0%), --require-coverage asks for" in err
        assert "`rankscope layout TRACE --out layout.toml`" in err


def test_a_fault_keeps_its_exit_code_whatever_coverage_is_required(tmp_path: Path):
    trace = traced(tmp_path, is_faulty=True)
    assert rankscope("check", trace, "--require-coverage", "1")[0] == 1


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("90", "for 90 in a hundred, write 90% or 0.9"),
        ("nan", "as in 0.9 or 90%"),
        ("-0.1", "as in 0.9 or 90%"),
        ("101%", "as in 0.9 or 90%"),
        ("nine tenths", "as in 0.9 or 90%"),
    ],
)
def test_what_is_no_part_of_all_values_cannot_be_required(tmp_path: Path, part: str, remedy: str):
    code, out, err = rankscope(
        "check", traced(tmp_path, is_faulty=False), f"--require-coverage={part}", "--json"
    )
    assert code == 2
    assert err.startswith(f"rankscope: --require-coverage {part}: expected a part from 0 to 1; ")
    assert remedy in err and remedy in json.loads(out)["errors"][0]


def test_where_a_layout_file_was_given_its_gaps_are_named(tmp_path: Path):
    trace, file = undeclared(tmp_path), tmp_path / "layout.toml"
    entry = '[[layout]]\npath = "(root)"\nslot = "input"\nplacements = { tp = "Shard(0)" }\n'
    file.write_text(f'axes = "tp=2"\n{entry}')
    code, out, err = rankscope("check", trace, "--layout", file, "--require-coverage", "90%")
    assert code == 3
    first = out.splitlines()[0]
    names = "(cut:param:weight, (root):output)"
    assert f"; 2 lie in a layout that {file} does not describe {names}; " in first
    assert f"2 lie in a layout that {file} does not describe {names}" in err
    assert "add [[layout]] entries for them to that file" in err
    assert "rankscope layout" not in out + err


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_layout_file_says_what_plain_tensors_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    for number in range(2):
        rank = PaperRank(tmp_path, number, 2)
        setup(rank, {"router.weight": numbers(number), "fc.weight": numbers(9)})
        rank.end()
        rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    file = tmp_path / "layout.toml"
    file.write_text(ROUTER)
    assert rankscope("check", tmp_path / "trace")[0] == 0
    words = ["--layout", str(file)] if how == "option" else []
    if how == "variable":
        monkeypatch.setenv("RANKSCOPE_LAYOUT", str(file))
    code, out, _ = rankscope("check", tmp_path / "trace", *words)
    assert code == 1
    assert "router:param:weight" in out


def test_without_an_answer_it_exits_2_and_says_so_in_json_as_well(tmp_path: Path):
    code, out, err = rankscope("check", tmp_path / "none", "--json")
    assert code == 2
    answer = json.loads(out)
    assert "no such folder" in answer.pop("errors")[0] and "no such folder" in err
    assert answer == {
        "format": "rankscope/1", "command": "check", "status": "error", "result": None,
    }  # fmt: skip
    trace = traced(tmp_path, is_faulty=False)
    (tmp_path / "layout.toml").write_text('axes = "tp=8"\n')
    code, _, err = rankscope("check", trace, "--layout", tmp_path / "layout.toml")
    assert code == 2
    assert "axes tp=8 are those of 8 ranks, the run had 2" in err


def test_one_event_is_one_origin_that_names_all_its_parameters(tmp_path: Path):
    for number in range(2):
        rank = PaperRank(tmp_path, number, 2)
        setup(rank, {f"m{n}.weight": numbers(n + 50 * number) for n in range(9)}, mesh=PAIR)
        rank.end()
        rank.ship(tmp_path / "trace")
    build(tmp_path / "trace")
    trace = package.open_trace(tmp_path / "trace")
    lines = [*report_lines(package.check(trace), [])]
    assert lines[0].startswith(f"fault: replica-mismatch, 1 origin (9 of 9 values {HELD}")
    assert lines[1].endswith("; the same kind of fault: all 9 parameters at setup")
    assert f"    parameters: {', '.join(f'm{n}.weight' for n in range(9))}" in lines


def test_the_page_names_every_kind_that_check_tells():
    of_diff = {Kind.DIVERGENCE, Kind.PERMUTATION}
    for kind in set(Kind) - of_diff:
        assert f"`{kind.value}`" in PAGE.read_text(), kind
