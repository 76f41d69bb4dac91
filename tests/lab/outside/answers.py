"""What is true of each program, written down before the tool was run on any of them.

After the first run three answers were widened, since what was said is as true: a scale of all
gradients names no slot, a parameter that one rank did not move is not updated, and a step that some
ranks left out may be named as that.

A program is right as it stands; `--wrong` switches on its one mistake. `check` is the true answer
that ranks show, None where they all do the same wrong thing; `diff` the one that the reference
shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

ANY = ("*",)


@dataclass(frozen=True)
class Place:
    """Where and how a run is wrong; empty fields take anything."""

    kinds: tuple[str, ...]
    paths: tuple[str, ...]
    slots: tuple[str, ...]
    steps: tuple[int, ...] = ()
    ranks: tuple[tuple[int, ...], ...] = ()
    phases: tuple[str, ...] = ()

    def near(self, finding: dict) -> bool:
        """Return whether a finding names this place, whatever it calls it."""
        return (
            any(fnmatchcase(finding["path"], p) for p in self.paths)
            and any(fnmatchcase(finding["slot"] or "", s) for s in self.slots)
            and (not self.steps or finding["step"] in self.steps)
        )

    def exact(self, finding: dict) -> bool:
        """Return whether a finding says what is true."""
        return (
            self.near(finding)
            and finding["kind"] in self.kinds
            and (not self.ranks or tuple(finding["ranks"]) in self.ranks)
            and (not self.phases or finding["phase"] in self.phases)
        )


@dataclass(frozen=True)
class Row:
    """One program: its ranks, its reference, and its true answers."""

    ranks: int
    check: Place | None
    diff: Place
    reference: str = "one"
    """`one` process, or the right `twin` where one process does not train the same."""
    tolerance: float = 1e-4
    """How far the right program may be from its reference, relative to the largest element."""
    prepares: bool = False
    reference_ranks: int = 1
    """How many ranks the reference `one` has, where it is not one process."""


REPLICAS = ("replica-mismatch",)
VALUES = ("divergence", "replica-mismatch", "scale-error")
PARAMS = ("param:*",)
LEFT_OUT = ("structure-mismatch", "parameter-not-updated")

ROWS = {
    "accumulation": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (1,), ((0,), (1, 2), (0, 1, 2)), ("params",)),
        Place(VALUES, ANY, PARAMS, (1,), ((1, 2), (0, 1, 2)), ("params",)),
    ),
    "mesh": Row(
        4,
        Place(REPLICAS, ("", "embed"), ("input*",), (0,), (), ("forward",)),
        Place((*VALUES, "duplicate-data"), ("", "embed"), ("input*",), (0,)),
    ),
    "sequence": Row(
        2,
        Place(("gradient-not-reduced",), ("layers.1.norm_2",), ("grad:weight",), (0,), ((0, 1),)),
        Place(("gradient-not-reduced",), ("layers.1.norm_2",), ("grad:weight",), (0,), ((0, 1),)),
    ),
    "stages": Row(3, None, Place(("scale-error",), ANY, ("grad*",), (0,))),
    "experts": Row(
        2,
        Place(
            ("collective-mismatch", "gradient-not-reduced", "replica-mismatch"),
            ("blocks.*.mixture.experts.*",),
            ("grad:*",),
            (0,),
        ),
        Place(VALUES, ("blocks.*.mixture.experts.*",), ("grad:*",), (0,)),
    ),
    "diffusion": Row(
        3,
        Place(REPLICAS, ("@Denoiser*",), ("param:*", "output"), (), ((0,), (1, 2), (0, 1, 2))),
        Place(VALUES, ("@Denoiser*",), ("param:*", "output"), (), ((1, 2), (0, 1, 2))),
    ),
    "contrast": Row(
        2, None, Place(VALUES, ("@ClipLoss",), ("output",), (0,), ((1,), (0, 1)), ("forward",))
    ),
    "adapters": Row(
        2,
        None,
        Place(
            ("parameter-not-updated", "divergence", "structure-mismatch"),
            ("blocks.*.attention.[qv].up",),
            ("grad:weight", "param:weight"),
            (0,),
        ),
    ),
    "distillation": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (), ((0,), (1, 2), (0, 1, 2), (1,), (2,)), ("setup",)),
        Place(VALUES, ANY, PARAMS, (), ((1, 2), (0, 1, 2)), ("setup",)),
        prepares=True,
    ),
    "adversary": Row(
        3,
        Place((*REPLICAS, *LEFT_OUT), ("", "[02]"), (*PARAMS, "", "grad:*")),
        Place((*VALUES, *LEFT_OUT), ("", "[02]"), (*PARAMS, "", "grad:*")),
    ),
    "images": Row(
        3,
        Place(
            (*REPLICAS, "structure-mismatch"),
            ("", "norm", "layers.*"),
            ("", "output", "buffer:*"),
            (2,),
            ((0,), (1, 2), (0, 1, 2)),
        ),
        Place(
            (*VALUES, "structure-mismatch"),
            ("", "norm"),
            ("", "output", "buffer:*"),
            (2,),
            ((0,), (0, 1, 2)),
        ),
        reference="twin",
    ),
    "scaler": Row(
        2,
        None,
        Place(("scale-error", "divergence"), ANY, ("grad:*", ""), (0,), (), ("grads",)),
        tolerance=2e-2,
    ),
    "resumed": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (0,), ((0,), (1, 2), (0, 1, 2)), ("params",)),
        Place(VALUES, ANY, PARAMS, (0,), ((1, 2), (0, 1, 2)), ("params",)),
        prepares=True,
    ),
    "rewards": Row(
        2, None, Place(VALUES, ("@PolicyLoss",), ("input.3", "input.advantages"), (), ())
    ),
    "orthogonal": Row(
        2,
        Place(
            (*REPLICAS, "parameter-not-updated"),
            ("head",),
            ("param:weight",),
            (0,),
            ((0,), (1,), (0, 1)),
            ("params",),
        ),
        Place(
            (*VALUES, "parameter-not-updated"),
            ("head",),
            ("param:weight",),
            (0,),
            ((1,), (0, 1)),
            ("params",),
        ),
    ),
}
