"""What `check` and `diff` have to say: findings, and the report they stand in."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope.record.call import Mode
from rankscope.record.phases import Phase

NAMED_VICTIMS: Final = 5
MOST_NAMED: Final = 3
"""Names of undeclared values that a sentence lists."""


class Kind(str, enum.Enum):
    """What is wrong, the only list of it. The words stand in reports: scripts rely on them."""

    STRUCTURE = "structure-mismatch"
    """A module that all ranks of a group should call was not called by some."""
    SHAPE = "shape-mismatch"
    DTYPE = "dtype-mismatch"
    PLACEMENT = "placement-mismatch"
    """Ranks place one value differently, or a DTensor says `Replicate()` for unequal values."""
    REPLICA = "replica-mismatch"
    """Ranks that should hold the same value hold different ones."""
    GRADIENT = "gradient-not-reduced"
    """Replicas enter the optimizer step with gradients of their own data alone."""
    NONFINITE = "nonfinite-origin"
    """The first NaN or infinity that was computed from finite values."""
    COLLECTIVE = "collective-mismatch"
    """A collective whose sides do not match, or whose output does not follow from its inputs."""
    GROUP = "group-mismatch"
    """Ranks that mean different members by one process group."""
    HANG = "hang"
    RECOMPUTE = "recompute-mismatch"
    """Activation checkpointing recomputed a different value."""
    PARAMETER = "parameter-not-updated"
    """A parameter with a gradient that an optimizer step left as it was."""
    DIVERGENCE = "divergence"
    """A value that differs from the reference although its inputs do not."""
    SCALE = "scale-error"
    PERMUTATION = "permutation"
    DUPLICATE = "duplicate-data"
    """Data-parallel ranks received the same batch, or shards hold the same numbers."""
    CRASH = "crash"
    INSTALLED = "installed-rule"
    """What a rule of another package found; its message says what."""

    @property
    def advice(self) -> str:
        """What to look at; "" for a kind whose findings say so themselves."""
        return _ADVICE.get(self, "")


_ADVICE: Final = {
    Kind.STRUCTURE: "Look for a condition in the module that calls it which depends on the rank, "
    "or on values that differ between ranks.",
    Kind.SHAPE: "Compare how these ranks cut or build the tensor: sizes, offsets, padding.",
    Kind.DTYPE: "Look for a cast, an autocast region or a checkpoint of another dtype on these "
    "ranks.",
    Kind.PLACEMENT: "Look at the DTensor.from_local call that makes this value: with "
    "run_check=False nothing compares what it calls Replicate(). Reduce or broadcast it first, or "
    "give it the placement it has. Behind dropout: ranks that hold the same must draw the same "
    "random numbers.",
    Kind.GRADIENT: "All gradients: call the model through its data-parallel wrapper, not through "
    ".module, and look at no_sync() around the last micro-batch. A few: look at parameters added "
    "after wrapping, and at norms of sequence-parallel ranks, which need an all-reduce of their "
    "own. Local SGD on purpose is known by its average: trace a step in which ranks average.",
    Kind.NONFINITE: "Look at this module on these ranks: its inputs were finite. Keep its full "
    "tensors: --rs-tensors with its path.",
    Kind.COLLECTIVE: "Compare the order and the arguments of collectives on these ranks: each "
    "must be called by all members in the same order, with the same op and reduce op.",
    Kind.GROUP: "Call new_group with the same lists in the same order on every rank, also on "
    "those that are not members.",
    Kind.HANG: "Find out why these ranks did not come to this collective: a branch, a loop of "
    "another length, an exception that was caught.",
    Kind.RECOMPUTE: "Checkpointed code must do the same twice: look for random numbers without "
    "preserve_rng_state, for state it changes, and for another autocast or mode in backward.",
    Kind.PARAMETER: "Make the optimizer after fully_shard, parallelize_module or a change of the "
    "parameters, from the model's own parameters().",
    Kind.DUPLICATE: "Look at the sampler: DistributedSampler, its rank and its seed, or a loader "
    "that is built from the global rank.",
    Kind.CRASH: "The traceback of this rank is in its log. One that is gone without an exception "
    "left none: ask the kernel's log (out of memory), the scheduler, and who could send it a "
    "signal.",
}
"""Advice of kinds that always ask for the same; replicas have `PhaseFacts.unequal`."""


class Severity(str, enum.Enum):
    """How much a finding weighs: warnings leave a verdict clean."""

    FAULT = "fault"
    WARNING = "warning"


class Verdict(str, enum.Enum):
    """The answer in one word."""

    CLEAN = "clean"
    FAULT = "fault"
    INCOMPLETE = "incomplete"
    """No fault was found, but records are missing or nothing could be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault: where it is, and what follows from it."""

    kind: Kind
    severity: Severity
    phase: Phase
    mode: Mode
    step: int
    micro_batch: int | None
    path: str
    slot: str
    """"" for a finding without a value: a missing call, a crashed rank."""
    ranks: tuple[int, ...]
    is_origin: bool
    """True where no other fault came before it."""
    victims: int
    victim_names: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    message: str
    advice: str

    def __post_init__(self) -> None:
        if self.ranks != tuple(sorted(set(self.ranks))):
            raise ValueError(f"ranks {self.ranks} are not sorted")

    @property
    def place(self) -> str:
        """Path and slot, as people write them."""
        return f"{self.path or '(root)'}{f':{self.slot}' if self.slot else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Values to which no rule between ranks applied."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer of one command."""

    command: str
    verdict: Verdict
    compared: int
    """Values that some rule was applied to: slots of nodes, over all their ranks."""
    skipped: tuple[Skipped, ...]
    recorded: int
    """Values in the trace, counted in the same way."""
    alone: int
    """Compared values that had no counterpart: only examined for NaN and infinity."""
    findings: tuple[Finding, ...]
    """Origins first, in order of cause."""
    unpaired: int = 0
    """Of `diff`: recorded values that only one of the traces holds."""
    undeclared: int = 0
    """Values without a counterpart that several ranks hold and no layout describes."""
    undeclared_names: str = ""
    """The undeclared values as `layers.*.fc:output`; of more than `MOST_NAMED` the first."""
    notes: tuple[str, ...] = ()
    preflight: tuple[tuple[str, bool | None, str], ...] = ()
    """Of `diff`: conditions compared before any number, whether both runs share them (None where
    the traces do not tell), in words; differences first."""
    equal: Mapping[Phase, tuple[int, int]] | None = None
    """Of `diff` by hashes: {phase: (bitwise equal, compared)}, in order of execution."""
    lacks: str = ""
    """Why nothing could be judged and what to do about it; "" where something was judged."""
    layout: str = ""
    """Of `check`: name of the layout file given to the command or to the job."""
    is_live: bool = False
    """The job is still running, so the trace is still growing."""

    @property
    def judged(self) -> int:
        """Values that some rule could judge: none whose layout is unknown."""
        return self.compared - self.undeclared

    @property
    def held_to_others(self) -> int:
        """Values whose numbers were held to those of another rank, or of another run of them."""
        return self.compared - self.alone

    @property
    def held_to_finite_only(self) -> int:
        """Values that were searched for NaN and infinity alone."""
        return self.alone

    @property
    def coverage(self) -> float:
        """Part of the recorded values that was held to others, 0.0 to 1.0; 0.0 of none."""
        return self.held_to_others / self.recorded if self.recorded else 0.0

    @property
    def origins(self) -> tuple[Finding, ...]:
        """The findings that no other one explains."""
        return tuple(finding for finding in self.findings if finding.is_origin)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that need not be faults."""
        return tuple(f for f in self.findings if f.severity is Severity.WARNING)

    @property
    def victims(self) -> tuple[Finding, ...]:
        """The faults that follow from an origin."""
        return tuple(
            f for f in self.findings if not f.is_origin and f.severity is not Severity.WARNING
        )

    def _repr_html_(self) -> str:
        import rankscope  # by the public name: rendering stands above this room

        return rankscope.report.fragment(self)
