"""The table: programs of unusual kinds, the proof of each, and what must be said of its mistake."""

from __future__ import annotations

from dataclasses import replace

from tests.lab.faults.expected import Expected
from tests.lab.faults.setup import Setup
from tests.lab.unusual.case import Case, only_a_reference, said
from tests.lab.unusual.programs import apart, context, features, several, sharded
from tests.lab.unusual.truths import as_alone, as_written_out

DRIFT = "replica-mismatch"
UNREDUCED = "gradient-not-reduced|replica-mismatch"


def of_a_pair(setup: Setup) -> Expected:
    """The culprit, or the two that should hold the same now."""
    told = said(DRIFT, "params", "*:param:*", ranks="culprit")(setup)
    partner = apart.partner(setup.culprit, 0)
    return replace(told, or_ranks=(tuple(sorted((setup.culprit, partner))),))


CASES: tuple[Case, ...] = (
    Case(
        name="gossip",
        about="ranks average with a partner; one uses its values of before the step",
        program=apart.gossip,
        oracle=as_written_out(apart.gossip_written_out),
        expected=of_a_pair,
        ranks=(4,),
    ),
    Case(
        name="codebook",
        about="averages of a codebook are summed over ranks; the counts are not",
        program=features.coded,
        oracle=as_alone(features.coder_alone),
        expected=said(DRIFT, "params|forward|setup", "codes:buffer:counts", "codes:*", step=None),
        beside=said(DRIFT + "|divergence", "params|forward", "codes:*", step=None),
        reference=features.coder_alone,
    ),
    Case(
        name="contrast-through-gather",
        about="a contrastive loss; the gather gives no gradient",
        program=features.contrasted,
        oracle=as_alone(features.contrast_alone),
        expected=only_a_reference,
        beside=said("divergence|scale-error", "backward", ":grad_output*"),
        reference=features.contrast_alone,
    ),
    Case(
        name="flat-shards",
        about="ZeRO-1 by hand; one rank puts the pieces together one place too far",
        program=sharded.flat_shards,
        oracle=as_alone(sharded.adam_alone),
        expected=said(DRIFT, "params|setup|forward", "*:param:*", ranks="culprit", step=None),
        beside=said(DRIFT + "|divergence", "params", "*:param:*", ranks="culprit", step=1),
        reference=sharded.adam_alone,
        ranks=(3,),
    ),
    Case(
        name="adversaries",
        about="a generative pair; the generator's gradients are not averaged",
        program=several.adversaries,
        oracle=as_alone(several.adversaries),
        expected=said(UNREDUCED, "grads", "*:grad:*"),
        beside=said(UNREDUCED, "grads", "*:grad:*"),
        reference=several.adversaries,
    ),
    Case(
        name="ring-attention",
        about="keys and values go around a ring; the mask goes the other way",
        program=context.ring,
        oracle=as_alone(context.read_alone),
        expected=only_a_reference,
        beside=said("divergence", "forward", "mixes.0.out:input*", "mixes.0:output"),
        reference=context.read_alone,
        ranks=(4,),
    ),
)
ROWS = tuple(case.for_check() for case in CASES)
BY_NAME = {row.name: row for row in ROWS}
