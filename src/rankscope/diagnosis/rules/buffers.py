"""What is no trained parameter and yet the same on all replicas: buffers and frozen parameters.

**At setup** a value differs where every parameter of the model is a replica or placed by a
framework. It is a fault where the others hold one value and some hold zeros, memory that nobody
wrote, or what a strict majority does not hold; and where each rank drew a buffer for itself (mean
zero within the error of a sample, as large on all ranks). Slices of a table, as context-parallel
ranks hold them, differ on every rank and look like none of this.

A **frozen model** that each rank of DDP calls on rows of its own, without a word to the others, is
the same on all of them: DDP sends only what it wraps, so what nobody loaded stays as it was drawn.

**Behind a step** a buffer differs that was the same before. Batch statistics are each rank's own,
and so are the state of a rank's rows and whatever ranks hand to a collective to be summed. It is a
fault where another buffer of the module, or this one of the sibling modules, changed and agrees
although these ranks were given different rows: that one was reduced. Else it is one warning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, Latest
from rankscope.diagnosis.evidence.distances import (
    inferred_evidence,
    is_far_from,
    is_fine,
    is_within_rounding,
    minority,
    rounding_of,
    sides_text,
)
from rankscope.diagnosis.evidence.issuedcollectives import issues_of
from rankscope.diagnosis.evidence.replicas import DDP
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, root_of, sibling_path
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.texts import counted

_FEWEST_ELEMENTS: Final = 8
_ERRORS: Final = 5.0
"""A sample's mean lies within so many standard errors of the true one."""
_SPREAD: Final = 2.0
"""Root mean squares of one distribution lie no further apart."""
STATISTICS: Final = frozenset({"buffer:running_mean", "buffer:running_var"})
_STARTS_ADVICE: Final = (
    "No checkpoint holds a buffer with persistent=False, and FSDP broadcasts no buffer: compute or "
    "broadcast it on every rank behind to_empty(), and draw random numbers from one seed. What is "
    "meant to differ can be declared in a layout file (own = true)."
)
_FROZEN_ADVICE: Final = (
    "DDP sends only what it wraps: load what is frozen on every rank, or broadcast it, and update "
    "a moving average on all of them. What is meant to differ can be declared in a layout file "
    "(own = true)."
)
_DRIFT_ADVICE: Final = (
    "Reduce what this buffer is updated with over these ranks, or broadcast it. Where each rank is "
    "to keep its own, declare that in a layout file (own = true)."
)


# ---- at setup ------------------------------------------------------------------------------------


def unlike_starts(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every buffer and frozen parameter that some replicas begin without."""
    if not step_view.is_setup:
        return
    parameters = list(step_view.parameters(Phase.SETUP))
    is_training = not all(map(_is_frozen, parameters))
    for values in step_view.values(Phase.SETUP):
        is_buffer = values.slot.startswith("buffer:")
        if not (is_buffer or (is_training and _is_frozen(values))) or not _is_shared(
            step_view, values
        ):
            continue
        if values.agree(values.ranks) is not False:
            if values.agree(values.ranks):
                step_view.context.coverage.applied(values)
            continue
        others = [v for v in parameters if v is not values and _is_beside(v, values)]
        # what data-parallel ranks hold is the same on all of them; others may cut what is frozen
        lines = step_view.life.data_parallel_lines
        is_whole = is_buffer or any(np.isin(values.ranks, line).all() for line in lines)
        odd, how = _odd_ranks(values, is_whole=is_whole)
        if not len(odd) or not _are_replicas(others, values.ranks):
            continue
        step_view.context.coverage.applied(values)
        count = sum(v.source != "unknown" or v.agree(values.ranks) is True for v in others)
        which = f"all {count}" if count == len(others) else f"{count} of {len(others)}"
        beside = (
            f", while {which} other parameters of these ranks are replicas or placed by DTensors"
        )
        yield step_view.candidate(
            values,
            Kind.REPLICA,
            odd,
            f"{ranks_named(odd)} {how}{beside if count else ''} "
            f"({sides_text(values, values.ranks)})",
            advice=_STARTS_ADVICE if is_buffer else _FROZEN_ADVICE,
            evidence=partial(
                inferred_evidence, values, values.ranks, is_resolved=len(odd) < len(values.ranks)
            ),
            members=values.ranks,
        )


def _is_frozen(values: SlotValues) -> bool:
    is_parameter = values.slot.startswith("param:") and values.source == "unknown"
    return is_parameter and not values.needs_gradient


def _is_shared(step_view: JudgedStep, values: SlotValues) -> bool:
    """False for what each rank may have for itself: declared so, or statistics of its own rows."""
    is_plain = len(values.ranks) > 1 and values.source == "unknown"
    slots = (slot for call in step_view.named(values.call.path) for slot in call.slots)
    return (
        is_plain
        and not step_view.context.layouts.is_own(values)
        and (not values.slot.startswith("buffer:") or STATISTICS.isdisjoint(slots))
    )


def _is_beside(parameter: SlotValues, values: SlotValues) -> bool:
    is_held = bool(np.isin(parameter.ranks, values.ranks).any())
    return is_held and root_of(parameter.call.path) == root_of(values.call.path)


def _are_replicas(parameters: Sequence[SlotValues], ranks: Array) -> bool:
    """True where each is placed, or the same on these ranks but for a minority, and one tells."""
    telling = [v for v in parameters if v.source != "unknown" or not v.is_constant]
    return bool(telling) and all(
        values.source != "unknown"
        or values.agree(ranks)
        or (_is_frozen(values) and len(minority(values.ranks, values.hashes)) < len(values.ranks))
        for values in parameters
    )


def _odd_ranks(values: SlotValues, *, is_whole: bool) -> tuple[Array, str]:
    """Return the ranks with a wrong value, and words for this value: `hold zeros`."""
    ranks, sizes = values.ranks, values.rms
    if not values.has_elements.all():
        return ranks[:0], ""
    is_finite = np.array([values.is_finite(ranks[n : n + 1]) for n in range(len(ranks))])
    filled = sizes[is_finite & (sizes > 0)]
    usual = float(np.median(filled)) if len(filled) else 0.0
    is_far = ~is_finite | is_far_from(sizes, usual)
    for is_odd, how in ((sizes == 0, "zeros"), (is_far, "memory that nobody wrote")):
        others = values.hashes[~is_odd]
        if (
            is_odd.any()
            and len(others)
            and len(np.unique(others)) == 1
            and rounding_of(values.dtype)
        ):
            return ranks[is_odd], f"{'holds' if is_odd.sum() == 1 else 'hold'} {how}"
    odd = minority(ranks, values.hashes)
    if len(odd) < len(ranks):
        verb = "holds" if len(odd) == 1 else "hold"
        return odd, f"{verb} another value than the other replicas"
    means, deviations = abs(values.column("mean")), values.column("std")
    is_drawn = means * np.sqrt(values.counts) <= _ERRORS * deviations
    is_drawn &= (deviations > 0) & (values.counts >= _FEWEST_ELEMENTS)
    is_alike = sizes.max() <= _SPREAD * sizes.min()
    if is_whole and is_drawn.all() and is_alike and len(np.unique(values.hashes)) == len(ranks):
        return ranks, "drew it each for itself"
    return ranks[:0], ""


# ---- frozen models -------------------------------------------------------------------------------


def unlike_frozen_models(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every model that nobody trains and that ranks of one DDP model hold
    unlike, no majority alike, and each call on rows of their own."""
    life = step_view.life
    lines, setup = life.data_lines.get(DDP, ()), life.setup
    if not lines or setup is None:
        return
    inside = (issue for issue in issues_of(step_view) if issue.facts.get("issuer") == "forward")
    exchanging = {root_of(issue.call.path) for issue in inside}
    trained = {root_of(path) for path in (*life.replicas.wrapped, *(p for p, _ in life.trained))}
    for call, line in itertools.product(step_view.roots, lines):
        root = root_of(call.path)
        unlike = [v for v in life.replicas.unlike_in(root) if np.isin(line, v.ranks).all()]
        is_one_model = root in trained | exchanging
        if is_one_model or not unlike or not np.isin(line, call.ranks).all():
            continue
        is_fed_apart = any(values.agree(line) is False for values in call.inputs)
        if not is_fed_apart or not all(_is_apart(step_view, v, line) for v in unlike):
            continue
        first = unlike[0]
        yield setup.candidate(
            first,
            Kind.REPLICA,
            line,
            f"{ranks_named(line)} hold other numbers in {counted(len(unlike), 'parameter')} of a "
            f"frozen model, which each calls on rows of its own ({sides_text(first, line)})",
            advice=_FROZEN_ADVICE,
            once=f"frozen model {root}",
            evidence=partial(inferred_evidence, first, line),
        )


def _is_apart(step_view: JudgedStep, values: SlotValues, line: Array) -> bool:
    """True for a frozen parameter of which no strict majority holds one value."""
    is_split = len(minority(line, values.hashes[values.at(line)])) == len(line)
    return is_split and _is_frozen(values) and not step_view.context.layouts.is_own(values)


# ---- behind a step -------------------------------------------------------------------------------


def drifting_buffers(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every buffer that a step made different on replicas."""
    buffers = [v for v in step_view.values(Phase.PARAMS) if v.slot.startswith("buffer:")]
    if not buffers:
        return
    lines = step_view.lines
    handed = {
        number
        for issue in issues_of(step_view)
        for value in issue.call.inputs
        for number in value.hashes.tolist()
    }
    rows = {piece.shape[:1] for v in step_view.handed("") for piece in v.pieces if piece.shape}
    for values in buffers:
        group = next((values.ranks for line in lines if np.isin(values.ranks, line).all()), None)
        before = step_view.life.parameters.get((values.call.path, values.slot))
        if group is None or before is None or not _is_shared(step_view, values):
            continue
        was_equal = np.array_equal(before.ranks, group) and len(np.unique(before.hashes)) == 1
        if was_equal and values.agree(group):
            step_view.context.coverage.applied(values)
        if not was_equal or values.agree(group) is not False or not rounding_of(values.dtype):
            continue
        if is_within_rounding(values, [group]):
            continue
        if (candidate := _outvoted(step_view, values, before, group)) is not None:
            step_view.context.coverage.applied(values)
            yield candidate
            continue
        if not handed.isdisjoint(values.hashes.tolist()):
            continue
        reduced = next((v for v in buffers if _was_reduced(step_view, v, values, group)), None)
        # a state of rows has more dims than rows alone: so many classes or experts are chance
        is_of_rows = _are_counts(values) or any(
            len(p.shape) > 1 and p.shape[:1] in rows for p in values.pieces
        )
        if reduced is None and is_of_rows:
            continue
        step_view.context.coverage.applied(values)
        why = "which may be meant"
        if reduced is not None:
            why = f"while {reduced.name} changed and agrees on them"
        yield step_view.candidate(
            values,
            Kind.REPLICA,
            group,
            f"{ranks_named(group)} held the same before this step, and each changed it in another "
            f"way, {why} ({sides_text(values, group)})",
            advice=_DRIFT_ADVICE,
            severity=Severity.WARNING if reduced is None else Severity.FAULT,
            once="drifting buffer" if reduced is None else "",
            evidence=partial(inferred_evidence, values, values.ranks),
            members=group,
        )
        if reduced is None:
            return


def _outvoted(
    step_view: JudgedStep, values: SlotValues, before: Latest, group: Array
) -> Candidate | None:
    """Return the candidate for ranks that hold another value than most, which must have exchanged
    theirs; None where no strict majority holds one."""
    odd = minority(group, values.hashes[values.at(group)])
    is_told = len(odd) < len(group)
    if not is_told or not _is_made_alike(step_view, values, before, np.setdiff1d(group, odd)):
        return None
    verb = "holds" if len(odd) == 1 else "hold"
    return step_view.candidate(
        values,
        Kind.REPLICA,
        odd,
        f"{ranks_named(odd)} {verb} another value than the other replicas, which changed it alike "
        f"though they were given different rows ({sides_text(values, group)})",
        advice=_DRIFT_ADVICE,
        evidence=partial(inferred_evidence, values, values.ranks, is_resolved=True),
        members=group,
    )


def _are_counts(values: SlotValues) -> bool:
    """True where ranks hold whole numbers, as counts of their rows are."""
    columns = values.column("min"), values.column("max"), values.column("mean") * values.counts
    return all((abs(column - column.round()) <= 1e-6).all() for column in columns)


def _was_reduced(
    step_view: JudgedStep, buffer: SlotValues, values: SlotValues, group: Array
) -> bool:
    """True for a buffer beside `values` that ranks with other rows changed, and hold alike; few
    elements may be alike by chance, as counts are."""
    path, slot = buffer.call.path, buffer.slot
    is_sibling = slot == values.slot and sibling_path(path) == sibling_path(values.call.path)
    if buffer is values or not (path == values.call.path or is_sibling):
        return False
    before = step_view.life.parameters.get((path, slot))
    is_telling = not buffer.is_constant and (buffer.counts >= _FEWEST_ELEMENTS).all()
    return bool(is_telling) and _is_made_alike(step_view, buffer, before, group)


def _is_made_alike(
    step_view: JudgedStep, buffer: SlotValues, before: Latest | None, group: Array
) -> bool:
    """True where ranks with other rows changed a buffer, and hold the same of it, which is no round
    number: counts and bounds may be alike by chance."""
    if before is None or buffer.agree(group) is not True:
        return False
    place = buffer.place(int(group[0]))
    return bool(
        (buffer.counts[place] == 1 or buffer.counts[place] >= _FEWEST_ELEMENTS)
        and buffer.hashes[place] not in before.hashes
        and is_fine(buffer, place)
        and any(v.agree(group) is False for v in step_view.handed(buffer.call.path))
    )
