"""The command `diff`: exit codes, the first lines, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope
from rankscope.cli.app import main
from rankscope.errors import FolderError
from rankscope.testing import assert_same


class Outer(nn.Module):
    """A model in another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def run(
    folder: Path,
    *,
    epsilon: float = 1e-5,
    is_wrapped: bool = False,
    width: int = 8,
    offset: float = 0.0,
    seeds: tuple[int, int] = (0, 1),
    seed: int = 0,
    samples: int = 4,
    rate: float = 0.1,
    frozen: tuple[int, ...] = (),
    **settings: object,
) -> str:
    """Trace two training steps of a small model."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, width), nn.LayerNorm(width, eps=epsilon), nn.Linear(width, 4)
    )
    with torch.no_grad():
        model[2].weight += offset
    model = Outer(model) if is_wrapped else model
    for index in frozen:
        model[index].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with rankscope.trace(model, out=folder, steps="all", **settings):
        for source in seeds:
            torch.manual_seed(source)
            model(torch.randn(samples, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return str(folder)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["diff", *words])
    told = capsys.readouterr()
    return int(left.value.code or 0), told.out or told.err


def test_the_same_run_twice_is_clean_and_exits_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = asked(capsys, run(tmp_path / "a"), run(tmp_path / "b"))
    assert code == 0
    assert text.startswith("no fault found (")


def test_a_wrong_constant_is_told_in_the_first_five_lines_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = run(tmp_path / "a"), run(tmp_path / "b", epsilon=1e-2)
    code, text = asked(capsys, *pair)
    lines = text.splitlines()
    assert code == 1
    assert lines[0].startswith("fault: ")
    assert lines[1].startswith("  both runs: ")
    assert lines[2].startswith("  first: 1:output: ")
    code, text = asked(capsys, *pair, "--json")
    answer = json.loads(text)
    report = answer["result"]
    assert (code, answer["command"], answer["status"]) == (1, "diff", report["verdict"])
    assert report["findings"][0]["path"] == "1"
    assert {line["what"] for line in report["preflight"]} >= {"samples", "start", "steps"}


def test_a_rule_that_is_none_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = run(tmp_path / "a")
    code, text = asked(capsys, trace, trace, "--map", "nothing", "--json")
    assert code == 2
    assert "write 'regex=replacement'" in json.loads(text)["errors"][0]


def test_a_name_in_front_of_all_paths_of_one_run_is_taken_away_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, wrapped = run(tmp_path / "a"), run(tmp_path / "b", is_wrapped=True)
    names = "inner for (root)", "(root) for inner"
    for pair, name in zip(((plain, wrapped), (wrapped, plain)), names):
        code, text = asked(capsys, *pair)
        assert (code, text[:14]) == (0, "no fault found")
        assert f"note: models are paired by their parameters: {name} of the reference" in text
    code, text = asked(capsys, plain, run(tmp_path / "c", is_wrapped=True, epsilon=1e-2))
    assert code == 1 and "  first: inner.1:output: " in text


def test_a_parameter_of_another_shape_is_a_finding_and_no_agreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = run(tmp_path / "a"), run(tmp_path / "b", width=12)
    code, text = asked(capsys, *pair)
    assert code == 1
    assert "0:param:weight: its shape is [12, 8], and [8, 8] in the reference" in text
    assert "6 of 6 initial values differ" in text
    code, text = asked(capsys, pair[0], run(tmp_path / "c", width=16))  # as if filled up
    assert "0:param:weight: its shape" not in text and code == 1


def test_rows_of_an_earlier_step_are_said_to_be_those(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = asked(capsys, run(tmp_path / "a"), run(tmp_path / "b", seeds=(0, 0)))
    why = "4 samples are not in the reference's step; 4 came before, in its train step 0"
    assert code == 1 and why in text


def test_the_size_of_one_number_added_to_all_elements_is_told_by_the_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = asked(capsys, run(tmp_path / "a"), run(tmp_path / "b", offset=0.3), "--json")
    evidence = json.loads(text)["result"]["findings"][0]["evidence"]
    size = 0.3 * 32**0.5 / evidence["l2"]["ref"]
    assert code == 1 and evidence["relative_error"] == pytest.approx(size, rel=5e-3)


def test_a_rule_that_matches_nothing_is_named_and_one_that_merges_paths_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, wrapped = run(tmp_path / "a"), run(tmp_path / "b", is_wrapped=True)
    code, text = asked(capsys, plain, wrapped, "--map", r"^iner\.=")
    assert code == 1
    assert r"note: --map '^iner\.=' matches no path of the second trace" in text.splitlines()
    code, text = asked(capsys, plain, wrapped, "--map", "^.+=a")
    assert code == 2
    assert "the rules for paths make a of both inner.0 and inner.1" in text


def test_what_one_run_did_not_record_is_said_with_the_option_that_left_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = run(tmp_path / "a"), run(tmp_path / "b", phases="setup,forward")
    code, text = asked(capsys, whole, part)
    assert code == 0
    assert "are in one trace alone)" in text.splitlines()[0]
    assert "because the second trace was taken with --rs-phases setup,forward" in text
    code, text = asked(capsys, whole, part, "--require-coverage", "0.9")
    assert code == 3
    code, text = asked(capsys, whole, part, "--require-coverage", "some")
    assert code == 2
    nothing = run(tmp_path / "c", digest="none")
    code, text = asked(capsys, whole, nothing)
    assert code == 1
    assert text.startswith("incomplete: the traces have no value in common: TEST was taken with ")
    assert "--rs-digest none" in text.splitlines()[0]


def test_a_noise_trace_that_is_no_second_run_of_the_reference_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, other = run(tmp_path / "a"), run(tmp_path / "b", epsilon=1e-2)
    code, text = asked(capsys, whole, other, "--noise", whole)
    assert code == 2
    assert "nothing in it is off from the reference" in text
    code, text = asked(capsys, whole, other, "--noise", run(tmp_path / "c", seed=1))
    assert code == 2
    assert "it is not the reference's: " in text
    code, text = asked(capsys, whole, whole, "--noise", other)
    assert code == 0
    assert f"the distance of the reference and {other} (median " in text
    assert "by the table it would be a fault itself: 1:output: " in text


def test_exact_mode_says_in_five_lines_how_much_is_bitwise_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, other = run(tmp_path / "a"), run(tmp_path / "b", epsilon=1.1e-5)
    code, text = asked(capsys, whole, run(tmp_path / "c"), "--exact")
    assert code == 0
    assert text.startswith("clean: ")
    code, text = asked(capsys, whole, other, "--exact")
    lines = text.splitlines()
    assert (code, len(lines)) == (1, 5)
    assert lines[0].startswith("fault: ") and lines[0].endswith(" values are bitwise equal")
    assert lines[1].startswith("  first: 1:output: not bitwise the reference's (")
    assert lines[2] == "  where: 1  output  rank 0, forward of train step 0, micro-batch 0"
    assert "setup 6 of 6, forward 6 of " in lines[3]
    assert lines[4] == "  not comparable: none"
    code, text = asked(capsys, whole, other, "--exact", "--json")
    found = json.loads(text)["result"]
    assert (code, found["verdict"], found["findings"][0]["path"]) == (1, "fault", "1")
    assert found["exact"]["equal"] < found["compared"] == found["recorded"]
    assert found["exact"]["by_phase"]["setup"] == {"equal": 6, "compared": 6}
    code, text = asked(capsys, whole, other, "--exact", "--noise", whole)
    assert code == 2


def test_a_matrix_holds_several_runs_to_one_reference_a_row_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    ref, same = run(tmp_path / "ref"), run(tmp_path / "same")
    wrong, wrapped = run(tmp_path / "wrong", epsilon=1e-2), run(tmp_path / "w", is_wrapped=True)
    code, text = asked(capsys, "--matrix", ref, same)
    assert (code, text.splitlines()[0]) == (0, f"1 run compared with {ref}: 1 clean")
    code, text = asked(capsys, "--matrix", ref, same, wrong, wrapped)
    first, head, *rows = text.splitlines()
    assert code == 1
    assert first == f"3 runs compared with {ref}: 2 clean, 1 fault"
    assert head.split() == ["run", "verdict", "compared", "kind", "ranks", "first"]
    cells = [[cell.strip() for cell in row.split("  ") if cell] for row in rows]
    assert [row[:2] for row in cells] == [
        [same, "clean"], [wrong, "fault"], [wrapped, "clean"],
    ]  # fmt: skip
    assert cells[1][4:] == ["0", "1:output, forward of train step 0"]
    code, text = asked(capsys, "--matrix", ref, same, wrong, "--json")
    answer = json.loads(text)
    found = answer["result"]["runs"]
    assert (code, answer["status"]) == (1, "fault")
    assert [(each["run"], each["verdict"]) for each in found] == [(same, "clean"), (wrong, "fault")]
    assert found[1]["findings"][0]["path"] == "1"
    code, text = asked(capsys, "--matrix", "--exact", ref, same, "--json")
    answer = json.loads(text)
    assert (code, answer["status"]) == (0, "clean")
    assert answer["result"]["runs"][0]["exact"]["equal"] == found[0]["compared"]
    code, text = asked(capsys, ref, same, wrong)
    assert code == 2
    assert "2 runs are to be held to" in text and "--matrix" in text


def test_folders_paths_and_handles_are_traces_and_anything_else_is_said_to_be_none(
    tmp_path: Path,
) -> None:
    folder = run(tmp_path / "a")
    with rankscope.trace(nn.Linear(2, 2), out=tmp_path / "b") as handle:
        pass
    assert rankscope.diff(folder, Path(folder)).verdict.value == "clean"
    assert rankscope.diff(handle, handle).command == "diff"
    assert_same(folder, rankscope.open_trace(folder))
    with pytest.raises(FolderError, match="int is not a trace; give an open trace, its folder, or"):
        rankscope.diff(folder, 3)  # type: ignore[arg-type]


def test_what_the_traces_do_not_tell_is_not_called_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = [run(tmp_path / name, samples=70) for name in "ab"]
    _, text = asked(capsys, *traces)
    assert "not known: whether both runs had the same samples" in text
    assert "the same: samples" not in text
    _, text = asked(capsys, *traces, "--json")
    told = {line["what"]: line["same"] for line in json.loads(text)["result"]["preflight"]}
    assert told["samples"] is None and told["start"] is True


def test_other_options_of_the_optimizer_stand_before_any_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = asked(capsys, run(tmp_path / "a"), run(tmp_path / "b", rate=0.3))
    lines = text.splitlines()
    assert code == 1
    assert "train step 0: the optimizer steps with lr 0.3 for 0.1" in lines[1]
    assert "all updates are 3 times the reference's" in lines[2]


def test_parameters_that_are_left_behind_are_one_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = asked(capsys, run(tmp_path / "a"), run(tmp_path / "b", frozen=(0, 1)))
    assert code == 1
    assert text.startswith("fault: parameter-not-updated, 1 origin ")
    assert "stays as it was, and the reference's is updated; the same holds for 3 other" in text
