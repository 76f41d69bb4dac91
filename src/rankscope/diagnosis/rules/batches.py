"""Ranks that were handed another batch, or another micro-batch, than they should work on.

The same batch on data-parallel ranks is a warning: nothing breaks. Different batches are a fault on
ranks that share a layer: a module with other weights on each rank, whose output is the sum of all
ranks' parts, adds up parts of one layer. A root input that is bitwise a root output of another rank
in the step came from there: one that belongs to another micro-batch, or to none, is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import inferred_evidence, sides_text
from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, known_collectives
from rankscope.diagnosis.evidence.replicas import DDP
from rankscope.diagnosis.evidence.stages import stage_edges
from rankscope.diagnosis.evidence.stepview import root_of
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text

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
        shared = []
        for line in lines:
            answers = [values.agree(line) for values in inputs if values.has(line)]
            if answers and all(answers):
                shared.append(line)
        step_view.context.coverage.applied(*inputs)
        if shared:
            ranks = np.unique(np.concatenate(shared))
            yield step_view.candidate(
                inputs[0],
                Kind.DUPLICATE,
                ranks,
                f"{ranks_named(ranks)} are data-parallel ({source}) and were handed the same batch",
                severity=Severity.WARNING,
                once="duplicate batch",
                evidence=partial(
                    dict, data_axis=source, same_on=[ranks_text(line) for line in shared[:8]]
                ),
            )
            return


# ---- different batches ---------------------------------------------------------------------------

_ADVICE = (
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
                advice=_ADVICE,
                evidence=partial(inferred_evidence, differing, issue.ranks, summed_in=path),
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
