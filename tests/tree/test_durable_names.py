"""Files that stand for records are on disk under their names before the records may go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.spool.recordformat import StepEvent
from rankscope.tree.assembly.sources import find_streams
from rankscope.tree.build import assemble, build
from rankscope.tree.growingtree import GrowingTree
from tests.diagnosis.paper import module, numbers
from tests.tree.ranks_on_paper import PaperRank


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """What is renamed, put on disk and removed from now on, in order; all of it is done."""
    happened: list[tuple[str, Path]] = []
    sync, replace, remove = os.fsync, os.replace, shutil.rmtree

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        happened.append(("synced", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def renamed(source: Path, target: Path) -> None:
        replace(source, target)
        happened.append(("named", Path(target)))

    def removed(path: Path, *how: object, **more: object) -> None:
        happened.append(("removed", Path(path)))
        remove(path, *how, **more)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)
    return happened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A trace folder with the records of one rank."""
    rank = PaperRank(tmp_path)
    for step in range(3):
        rank.step(StepEvent.BEGIN, step)
        with rank.call(class_name="Model", step=step):
            module(rank, "a", numbers(1), numbers(2), step=step)
        rank.step(StepEvent.END, step)
    rank.end()
    rank.ship(tmp_path / "trace")
    return tmp_path / "trace"


def unsynced(happened: list[tuple[str, Path]]) -> Iterator[Path]:
    """Yield the files that have names that may be forgotten, or bytes."""
    for at, (what, path) in enumerate(happened):
        later = [one for kind, one in happened[at:] if kind == "synced"]
        if what == "named" and path.parent not in later:
            yield path


def test_steps_that_were_written_are_on_disk_before_their_records_may_go(
    out: Path, happened: list[tuple[str, Path]]
):
    tree = GrowingTree.to_write(out)
    assert tree is not None
    tree.add(assemble(find_streams([out])))
    assert [path.name for what, path in happened if what == "named"] == ["000000.safetensors"]
    assert [*unsynced(happened)] == []
    tree.sync()  # what is done before records are freed
    tree.close()
    assert happened[-3:] == [
        ("synced", out / "steps" / "index.jsonl"), ("synced", out / "steps"), ("synced", out)
    ]  # fmt: skip


def test_a_tree_is_on_disk_before_its_records_are_removed(
    out: Path, happened: list[tuple[str, Path]]
):
    build(out)
    removed = happened.index(("removed", out / "spool"))
    assert ("named", out / "trace.json") in happened[:removed]
    assert [*unsynced(happened[:removed])] == []
