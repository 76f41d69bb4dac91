"""Ranks that were handed another batch, or another micro-batch, than they should work on.

The same batch on data-parallel ranks is a warning: nothing breaks. So are batches that
share half of their rows, and those that come again in every epoch in one order; one batch for all
steps is an experiment, and batches that some steps alone work on twice are reused. Different
batches are a fault on ranks that share a layer: a module with other weights on each rank, whose
output is the sum of all ranks' parts, adds up parts of one layer. A root input that is bitwise a
root output of another rank in the step came from there: one that belongs to another micro-batch, or
to none, is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, candidate_at
from rankscope.diagnosis.evidence.distances import groups_named, inferred_evidence, sides_text
from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, known_collectives
from rankscope.diagnosis.evidence.replicas import DDP
from rankscope.diagnosis.evidence.stages import stage_edges
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped, root_of
from rankscope.diagnosis.evidence.trainedbatches import BatchCycle
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text

_SAME_ROW: Final = 1e-5
"""Relative distance of two sketches of the same row: they are kept as float32."""

# ---- the same batch ------------------------------------------------------------------------------


def duplicate_batches(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield one warning for data-parallel ranks that had the same inputs."""
    if step_view.is_setup or step_view.mode.word != "train":
        return
    varying = [values for c in step_view.roots for values in c.inputs if not values.is_constant]
    # a reference model beside what DDP wraps may share its batch
    wrapped = [call.path for call in step_view.calls if DDP in call.node.wrappers]
    roots = {root_of(path) for path in (*wrapped, *step_view.life.replicas.wrapped)}
    for source, lines in step_view.life.data_lines.items():
        inputs = [v for v in varying if source != DDP or root_of(v.call.path) in roots]
        step_view.context.coverage.applied(*inputs)
        shared = [part for line in lines for part in _handed_one(inputs, line)]
        text = "were handed the same batch"
        if len(shared) > 1:
            text = f"were handed one batch for {' and one for '.join(map(ranks_named, shared))}"
        if not shared:
            rows = [(line, *_shared_rows(inputs, line)) for line in lines]
            shared = [line for line, count, total in rows if 2 * count >= total > 0]
            count, total = (sum(numbers) for numbers in list(zip(*rows))[1:])
            text = f"share {count:,} of the {total:,} rows that they were handed"
        if shared:
            ranks = np.unique(np.concatenate(shared))
            yield step_view.candidate(
                inputs[0],
                Kind.DUPLICATE,
                ranks,
                f"{ranks_named(ranks)} are data-parallel ({source}) and {text}",
                severity=Severity.WARNING,
                once="duplicate batch",
                evidence=partial(
                    dict, data_axis=source, same_on=[ranks_text(line) for line in shared[:8]]
                ),
            )
            return


def _handed_one(inputs: Sequence[SlotValues], line: Array) -> list[Array]:
    """Return those ranks of a line that have one batch."""
    on_line = [values for values in inputs if values.are_known(line)]
    if not on_line:
        return []
    keys = zip(*(values.hashes[values.at(line)].tolist() for values in on_line))
    groups = grouped(zip(keys, line.tolist())).values()
    return [np.array(ranks, np.int64) for ranks in groups if len(ranks) > 1]


def _shared_rows(inputs: Sequence[SlotValues], line: Array) -> tuple[int, int]:
    """Return how many rows of a line another of its ranks has too, and how many there are."""
    on_line = [values for values in inputs if values.has(line)]
    kept = [{r: s for view in v.views for r, s in view.samples().items()} for v in on_line]
    parts = [[s[rank].rows for s in kept if rank in s] for rank in line.tolist()]
    counts = [{len(rows) for rows in part} for part in parts]
    if any(len(sizes) != 1 for sizes in counts) or len({len(part) for part in parts}) > 1:
        return 0, 0
    rows = np.concatenate([np.concatenate(part, axis=1) for part in parts])
    order = np.argsort(rows @ np.sqrt(np.arange(2, 2 + rows.shape[1])))
    ranks, rows = np.repeat(line, [len(part[0]) for part in parts])[order], rows[order]
    is_same = abs(np.diff(rows, axis=0)).max(axis=1) <= _SAME_ROW * abs(rows[1:]).max(axis=1)
    rows_of = np.append(0, np.cumsum(~is_same))
    holders = grouped(zip(rows_of.tolist(), ranks.tolist()))
    return sum(len(h) for h in holders.values() if len(set(h)) > 1), len(rows)


# ---- the same batches again ----------------------------------------------------------------------

_EPOCH_ADVICE: Final = (
    "Shuffle, and call the sampler's set_epoch before each epoch: without it DistributedSampler "
    "draws one order for all. Rows that are meant to come in one order are no fault."
)


def repeated_batches(step_view: StepView, cycles: Iterable[BatchCycle]) -> Iterator[Candidate]:
    """Yield a warning for each cycle that begins again in this step."""
    for cycle in cycles:
        ranks = np.array(cycle.ranks, np.int64)
        inputs = (v for call in step_view.roots for v in call.inputs if not v.is_constant)
        values = next((v for v in inputs if np.isin(ranks, v.ranks).any()), None)
        if values is not None:
            length, again = len(cycle.steps), cycle.again
            yield candidate_at(
                step_view,
                values.call,
                Kind.DUPLICATE,
                values.slot,
                ranks,
                f"{ranks_named(cycle.ranks)} had {length} batches, in steps {cycle.steps[0]} to "
                f"{cycle.steps[-1]}, and the same in the same order again in the {again} traced "
                "steps behind them",
                members=values.ranks[np.isin(values.ranks, ranks)],
                advice=_EPOCH_ADVICE,
                severity=Severity.WARNING,
                evidence=partial(dict, batches=length, steps_again=again),
            )


# ---- different batches ---------------------------------------------------------------------------

BATCHES_ADVICE: Final = (
    "Ranks that share a layer have to read the same rows: build the sampler from the data-parallel "
    "rank and size, not from the global ones."
)


def other_batches(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for the first root input that differs on ranks that sum up a layer."""
    if step_view.is_setup:
        return
    judged: set[tuple[int, ...]] = set()
    for issue in known_collectives(step_view):
        ranks, path = tuple(issue.ranks.tolist()), issue.call.path
        if ranks in judged or not _sums_a_layer(issue, step_view):
            continue
        judged.add(ranks)
        calls = (call for call in step_view.roots if call.micro_batch == issue.call.micro_batch)
        inputs = (values for call in calls for values in call.inputs)
        differing = next((values for values in inputs if values.agree(issue.ranks) is False), None)
        if differing is not None:
            step_view.context.coverage.applied(differing)
            yield step_view.candidate(
                differing,
                Kind.REPLICA,
                issue.ranks,
                f"{ranks_named(ranks)} were handed different batches, and add up their parts of "
                f"one layer in {path} ({sides_text(differing, issue.ranks)})",
                advice=BATCHES_ADVICE,
                evidence=partial(inferred_evidence, differing, issue.ranks, summed_in=path),
                priority=-1,
            )


def batches_of_a_mesh(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for the root input that differs on ranks of a mesh on which modules call
    their inputs `Replicate()`, and hold other numbers of the first. Where modules do so on other
    ranks too, it is the mesh of some of them that is wrong."""
    placed = [
        (values, replicas.groups, groups)
        for values, replicas, groups, _ in step_view.compared_replicas.values
        if replicas.source == "dtensor" and values.call.phase is Phase.FORWARD
        if values.slot.startswith("input")
    ]
    unlike = [(values, groups) for values, _, groups in placed if groups]
    meshes = {b"|".join(g.tobytes() for g in lines) for _, lines, _ in placed if unlike}
    for values, groups in unlike[:1] if len(meshes) == 1 else ():
        roots = (r for r in step_view.roots if r.micro_batch == values.call.micro_batch)
        inputs = (v for r in roots for v in r.inputs if v.source == "unknown" and not v.is_constant)
        entered = next((v for v in inputs if all(v.agree(g) is False for g in groups)), None)
        if entered is not None:
            ranks = np.unique(np.concatenate(groups))
            yield step_view.candidate(
                entered,
                Kind.REPLICA,
                ranks,
                f"{groups_named(groups)} were handed different batches, and {values.name} is "
                f"called Replicate() on them ({sides_text(entered, groups[0])})",
                advice=BATCHES_ADVICE,
                evidence=partial(inferred_evidence, entered, ranks, replicated=values.name),
                priority=-1,
            )


def _sums_a_layer(issue: IssuedCollective, step_view: JudgedStep) -> bool:
    """True where a module hands out a forward sum of what ranks made with weights of their own."""
    is_sum = issue.op == "all_reduce" and issue.facts.get("reduce") == "sum"
    if not is_sum or issue.facts.get("issuer") != "forward" or len(issue.ranks) < 2:
        return False
    call, replicas = issue.call, step_view.life.replicas
    if not call.path or not replicas.is_cut_between(call.path, issue.ranks):
        return False
    total = call.slots.get("output.0")
    if total is None or total.agree(issue.ranks) is not True or total.is_constant:
        return False
    return any(
        output.hashes[0] == total.hashes[0] and output.counts[0] == total.counts[0]
        for module in step_view.named(call.path)
        if module.phase is Phase.FORWARD and module.micro_batch == call.micro_batch
        for output in module.outputs
        if output.has(issue.ranks)
    )


# ---- stages of a pipeline ------------------------------------------------------------------------


def mixed_up_micro_batches(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every stage input that is not what was sent for its micro-batch."""
    for edge in stage_edges(step_view):
        sent_for = {number: micro for micro, (_, number) in edge.sent.items()}
        shifts = Counter(
            sent_for[number] - micro
            for micro, (_, number) in edge.taken.items()
            if number in sent_for
        )
        usual = min(shifts, key=lambda shift: (-shifts[shift], abs(shift)))
        for micro, (values, number) in sorted(edge.taken.items()):
            step_view.context.coverage.applied(values)
            sent = edge.sent.get(micro + usual)
            if sent is None or sent[1] == number:
                continue
            sender, receiver, origin = edge.sender, edge.receiver, sent_for.get(number)
            if origin is None and 2 * shifts[usual] < len(edge.taken):
                continue
            work = f"nothing that rank {sender} made in this step"
            if origin is not None:
                work = f"what rank {sender} made for micro-batch {origin}"
            facts = {"sender": sender, "receiver": receiver}
            yield step_view.candidate(
                values,
                Kind.COLLECTIVE,
                np.array([receiver], np.int64),
                f"in micro-batch {micro} rank {receiver} works on {work}",
                evidence=partial(dict, facts, micro_batch=micro, is_of_micro_batch=origin),
                priority=-1,
            )
