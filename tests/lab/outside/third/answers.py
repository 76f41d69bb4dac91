"""What is true of each program of the third board, written down before the tool was run on any.

A program is right as it stands; `--wrong` switches on its one mistake. `check` is the true answer
that ranks show, None where they all do the same wrong thing; `diff` the one that the reference
shows.
"""

from __future__ import annotations

from tests.lab.outside.answers import ANY, PARAMS, REPLICAS, VALUES, Place, Row

NOT_REDUCED = ("gradient-not-reduced",)

ROWS = {
    # The last stage is trained from step 2 on; its gradients are then each rank's own.
    "unfrozen": Row(
        3,
        Place(NOT_REDUCED, ("stages.2", "stages.2.*"), ("grad:*",), (2,), ((0, 1, 2),), ("grads",)),
        Place(
            (*NOT_REDUCED, "divergence", "replica-mismatch"),
            ("stages.2", "stages.2.*"),
            ("grad:*",),
            (2,),
            ((0, 1, 2),),
            ("grads",),
        ),
    ),
    # Changes of one size: a wrong bias may be a permutation of the right one.
    "balance": Row(
        2,
        Place(
            REPLICAS,
            ("blocks.*.router",),
            ("buffer:expert_bias",),
            (0,),
            ((0,), (1,), (0, 1)),
            ("params",),
        ),
        Place(
            (*VALUES, "permutation"),
            ("blocks.*.router",),
            ("buffer:expert_bias",),
            (0,),
            (),
            ("params",),
        ),
    ),
    # Scale and shift are set inside the first forward, which shows in its outputs beside another
    # run, and between ranks in the parameters after the step.
    "flow": Row(
        3,
        Place(
            REPLICAS, ("flows.*.norm",), PARAMS, (0,), ((0, 1, 2),), ("forward", "grads", "params")
        ),
        Place(
            VALUES,
            ("flows.*.norm",),
            ("output*", *PARAMS),
            (0,),
            ((0, 1, 2),),
            ("forward", "params"),
        ),
    ),
    # All gradients of a bucket are off by one factor, on each rank by another: then no slot is
    # named.
    "integers": Row(
        3,
        Place((*REPLICAS, "scale-error"), ANY, ("grad:*", ""), (0,), ((0, 1, 2),), ("grads",)),
        Place(VALUES, ANY, ("grad:*", ""), (0,), ((0, 1, 2),), ("grads",)),
    ),
    # The noise of rank 0 is that of one process.
    "privacy": Row(
        2,
        Place(REPLICAS, ANY, ("grad:*",), (0,), ((0, 1), (1,)), ("grads",)),
        Place(VALUES, ANY, ("grad:*",), (0,), ((1,), (0, 1)), ("grads",)),
    ),
}
