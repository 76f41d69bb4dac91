"""Jobs of every sort, on paper: each function writes the records of all ranks and builds a trace.
What `rankscope show` says of them fits one screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from rankscope.layout.placement import Mesh
from rankscope.record.call import CallStatus
from rankscope.record.notes import Note, NoteKind
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.tree.build import build
from tests.diagnosis.paper import collective, event, module, numbers, setup
from tests.tree.jobs import grid_job
from tests.tree.ranks_on_paper import PaperRank

HOSTILE = ["a\rb\x1b[2J", "<script>", "nul\0", "\u202eright to left", "x" * 10_000, "d." * 3_000]
"""Names that a model may give to its modules."""


def tensor_parallel(folder: Path) -> Path:
    """Four ranks on a 2x2 mesh, two steps."""
    grid_job(folder / "spools", folder / "trace", steps=2)
    build(folder / "trace")
    return folder / "trace"


def one_process(folder: Path) -> Path:
    """One rank, one step, nothing to compare."""
    rank = PaperRank(folder)
    with rank.call(class_name="Model"):
        module(rank, "fc", numbers(1), numbers(2))
    rank.end()
    return built(folder, rank)


def built(folder: Path, *ranks: PaperRank, end: str | None = None) -> Path:
    """Ship what ranks wrote, and build their trace."""
    for rank in ranks:
        rank.ship(folder / "trace", end=end)
    build(folder / "trace")
    return folder / "trace"


def pipeline(folder: Path) -> Path:
    """Two stages of two ranks with two layers each, two micro-batches."""
    ranks = []
    for number in range(4):
        rank = PaperRank(folder, number, 4)
        for micro_batch in range(2):
            with rank.call(class_name="Stage", micro_batch=micro_batch):
                for layer in range(2):
                    path = f"layers.{2 * (number // 2) + layer}"
                    made = {"class_name": "Block", "micro_batch": micro_batch}
                    with rank.call(path, **made) as call:
                        rank.value(call, "output", numbers(10 * layer + micro_batch))
        rank.end()
        ranks.append(rank)
    return built(folder, *ranks)


def crash(folder: Path) -> Path:
    """Rank 1 raises in its second layer; the other one waits and is lost."""
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        root = rank.enter(class_name="Model")
        for layer in range(2):
            call = rank.enter(f"layers.{layer}", class_name="Block", parent=root)
            rank.value(call, "input.0", numbers(layer))
            if number and layer:
                for each in (call, root):
                    rank.exit(each, CallStatus.RAISED, "ValueError: boom\x07 " + "long " * 100)
            elif not layer:
                rank.exit(call)
        if number:
            rank.end(EndReason.RAISED)
        rank.ship(folder / "trace", end="raised" if number else "lost")
    build(folder / "trace")
    return folder / "trace"


def hang(folder: Path) -> Path:
    """Rank 0 waits in a collective to which rank 1 does not come: it went past that layer."""
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        root = rank.enter(class_name="Model")
        for layer in range(2):
            path = f"layers.{layer}"
            call = rank.enter(path, class_name="Block", parent=root)
            rank.value(call, "input.0", numbers(layer))
            if not (number and layer == 1):
                made = None if layer else 2 * numbers(3)
                collective(rank, path, 7 + layer, numbers(3), made, parent=call)
            if not layer:
                rank.exit(call)
        rank.ship(folder / "trace", end="lost")
    build(folder / "trace")
    return folder / "trace"


def no_steps(folder: Path) -> Path:
    """Parameters alone: the job ended before the steps that were asked for."""
    ranks = []
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        setup(rank, {f"layers.{n}.fc.weight": numbers(n) for n in range(12)})
        rank.error(None, Note.of(NoteKind.NO_STEP_BEGUN, steps="40000"))
        rank.end()
        ranks.append(rank)
    return built(folder, *ranks)


def nothing_at_all(folder: Path) -> Path:
    """A rank that came and went."""
    rank = PaperRank(folder)
    rank.end()
    return built(folder, rank)


def evaluation(folder: Path) -> Path:
    """Eval steps alone."""
    rank = PaperRank(folder)
    for step in range(3):
        with rank.call(class_name="Model", mode="eval", step=step) as call:
            rank.value(call, "output", numbers(step))
    rank.end()
    return built(folder, rank)


def two_lives(folder: Path) -> Path:
    """An elastic restart: the first life was lost, the second went well."""
    ranks = []
    for life in range(2):
        for number in range(2):
            rank = PaperRank(folder, number, 2, incarnation=life)
            with rank.call(class_name="Model", step=life):
                module(rank, "fc", numbers(1), numbers(2))
            if life:
                rank.end()
            ranks.append(rank)
    return built(folder, *ranks)


def unfinished(folder: Path) -> Path:
    """No tree was written yet: the records of a job that runs."""
    rank = PaperRank(folder, 0, 2)
    with rank.call(class_name="Model") as call:
        rank.value(call, "output", numbers(1))
        rank.ship(folder / "trace", marker=False)
    return folder / "trace"


def hostile_names(folder: Path) -> Path:
    """Names of modules, classes, slots, meshes and errors that hold anything."""
    rank = PaperRank(folder, identity={"argv": ["\x1b[2J"]})
    with rank.call(class_name="Model\x1b[2J" + "y" * 5_000) as top:
        for name in HOSTILE:
            inner = rank.enter(name, class_name=name, parent=top)
            rank.value(inner, f"output.{name}", np.ones(2))
            rank.exit(inner, CallStatus.RAISED, f"ValueError: \x07 {name}")
    rank.error(None, "\x1b[31m" + "z" * 9_000)
    rank.end()
    return built(folder, rank)


def hundreds_of_modules(folder: Path) -> Path:
    """A model whose first two levels have hundreds of modules, no two alike."""
    rank = PaperRank(folder)
    with rank.call(class_name="Model"):
        for number in range(300):
            with rank.call(f"part_{number}", class_name=f"Part{number}"):
                for inner in range(3):
                    path = f"part_{number}.{'abc'[inner]}"
                    with rank.call(path, class_name="Linear") as call:
                        rank.value(call, "output", np.ones((number + 1, 2), np.float32))
    rank.end()
    return built(folder, rank)


def unlike_experts(folder: Path) -> Path:
    """Sixty-four experts, each with another number of tokens; ranks that disagree in one."""
    mesh = Mesh(axes=("ep",), shape=(2,), ranks=(0, 1))
    ranks = []
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        with rank.call(class_name="Model"):
            for expert in range(64):
                with rank.call(f"experts.{expert}", class_name="Expert") as call:
                    wide = 1 + expert * 7 % 61
                    rank.value(call, "output", np.ones((wide, 2), np.float32))
                    if expert == 40:
                        dtype = ("bfloat16", "float32")[number]
                        place = {"mesh": mesh, "placements": ["Replicate()"], "whole": (2,)}
                        rank.value(call, "held", np.ones(2), dtype=dtype, **place)
        rank.end()
        ranks.append(rank)
    return built(folder, *ranks)


def updates(folder: Path) -> Path:
    """All phases of a step, on two replicas of which one updates other weights."""
    ranks = []
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        weights = {f"layers.{n}.fc.weight": numbers(n) for n in range(4)}
        setup(rank, weights, wrappers=["DDP"])
        with rank.call(class_name="Model", wrappers=["DDP"]):
            for layer in range(4):
                module(rank, f"layers.{layer}.fc", numbers(layer), numbers(9 + layer))
        event(rank, Phase.GRADS, "grad", {n: v * 2 for n, v in weights.items()}, wrappers=["DDP"])
        new = {name: value + 1 for name, value in weights.items()}
        new["layers.2.fc.weight"] += number
        event(rank, Phase.PARAMS, "param", new, wrappers=["DDP"])
        rank.end()
        ranks.append(rank)
    return built(folder, *ranks)


JOBS: dict[str, Callable[[Path], Path]] = {
    job.__name__: job
    for job in (
        tensor_parallel, one_process, pipeline, crash, hang, no_steps, nothing_at_all, evaluation,
        two_lives, unfinished, hostile_names, hundreds_of_modules, unlike_experts, updates,
    )
}  # fmt: skip
