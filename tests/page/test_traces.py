"""The traces that pages are looked at with have what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.diagnosis.check import check
from rankscope.record.finding import Kind
from rankscope.tree.reader import open_trace
from tests.page.papertraces import HOSTILE, PAPER
from tests.page.realtraces import REAL
from tests.tree.jobs import read_valid


def test_there_is_a_trace_for_each_kind_of_finding() -> None:
    of_diff = {Kind.DIVERGENCE: "diff-divergence", Kind.SCALE: "diff-scale"}
    of_diff |= {Kind.PERMUTATION: "diff-permutation"}
    of_packages = {Kind.INSTALLED}  # tests/lab/diagnosis/test_new_rule.py has a page of such a kind
    named = {of_diff.get(kind, kind.value) for kind in {*Kind} - of_packages}
    assert named <= {*REAL, *PAPER}


@pytest.mark.parametrize("name", PAPER)
def test_a_paper_trace_has_the_fault_of_its_name(tmp_path: Path, name: str) -> None:
    out = PAPER[name](tmp_path)
    read_valid(out)
    kinds = {finding.kind.value for finding in check(open_trace(out)).origins}
    other = {"missing": {"crash"}, "hostile": {"replica-mismatch"}, "unbounded": set()}
    other |= {"losses": {"nonfinite-origin"}}
    assert kinds == other.get(name, {name})


def test_bad_names_are_in_the_trace_as_they_were_given(tmp_path: Path) -> None:
    trace = open_trace(PAPER["hostile"](tmp_path))
    nodes = [*trace.walk()]
    assert {*HOSTILE} <= {node.path for node in nodes} & {node.class_name for node in nodes}
    assert max(len(node.path) for node in nodes) > 10_000
