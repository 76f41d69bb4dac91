"""What is true of each program of the fifth board, written down before the tool was run on any.

A program is right as it stands; `--wrong` switches on its one mistake. `check` is the true answer
that ranks show, None where they all do the same wrong thing; `diff` the one that the reference
shows.
"""

from __future__ import annotations

from tests.lab.outside.answers import ANY, PARAMS, REPLICAS, VALUES, Place, Row

GRADS = ("grad:*",)
NOT_REDUCED = ("gradient-not-reduced", "replica-mismatch")
CHANGED = ("divergence", "replica-mismatch")
SCALED = ("divergence", "scale-error")
FINAL = ("grads", "accumulated")

ROWS = {
    # The third step has rows of the first one again. No rank has those of another.
    "epochs": Row(
        3,
        None,
        Place(
            (*CHANGED, "duplicate-data", "permutation"),
            ("", "enter"),
            ("input*",),
            (2,),
            ((0, 1, 2),),
            ("forward",),
        ),
    ),
    "gate": Row(
        2,
        Place(NOT_REDUCED, ("layers.*_scale",), GRADS, (0,), ((0, 1),), FINAL),
        Place((*NOT_REDUCED, "divergence"), ("layers.*_scale",), GRADS, (0,), ((0, 1),), FINAL),
    ),
    # Forward is right, and the loss is no module: its gradient is the first that is wrong.
    "loaders": Row(
        3,
        None,
        Place(
            VALUES,
            ("", "head"),
            ("grad_output*",),
            (0,),
            ((2,),),
            ("backward",),
            also=Place(VALUES, ANY, GRADS, (0,), ((2,), (0, 1, 2)), FINAL),
        ),
    ),
    # Owners send what they stepped, so that all ranks are wrong alike.
    "redundancy": Row(
        3,
        None,
        Place(VALUES, ANY, PARAMS, (0,), ((0, 1, 2),), ("params",)),
        prepares=True,
    ),
}
