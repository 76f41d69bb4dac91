"""Which samples the ranks of a step worked on, and which of the reference's these are.

A *unit* is one micro-batch of one data-parallel place: what one call of the root works on. The
samples of all units of a step are its batch. They are known by the sketches of the root's inputs,
so it does not matter how the batch was split, and in which order its samples came.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.comparison.wholevalues import EVERY_PLACE, WholeValues
from rankscope.diagnosis.evidence.replicas import InferredReplicas
from rankscope.diagnosis.evidence.stepview import Array, StepView
from rankscope.layout.infer import HeldParameter, axes_of, largest_mesh
from rankscope.layout.placement import Mesh
from rankscope.record.phases import Phase
from rankscope.record.value import is_whole_number
from rankscope.tree.tensors.proofs import held_parameter, prints_of

Unit = tuple[int, int]
"""(micro-batch, data-parallel place)."""
_SAME_TOKENS: Final = 1e-5
"""Relative distance of two sketches of the same integers: they are kept as float32."""
_SAME_FLOATS: Final = 2e-2


@dataclass(kw_only=True)
class StepSamples:
    """The samples of one step of one trace."""

    places: Array
    """[world] data-parallel place of every rank."""
    place_count: int
    micro_batches: int
    sizes: dict[Unit, int] = field(default_factory=dict)
    """Samples of each unit, in order of micro-batch and place; {} where none were recorded."""
    slot: str = ""
    """The root's input that tells the samples apart."""
    elements: float = 0.0
    """Of that input in one sample."""
    keys: Array | None = None
    """[samples, K] sketches that tell the samples apart, in the order of `sizes`."""
    is_of_integers: bool = True

    @property
    def total(self) -> int:
        """Samples of the step."""
        return sum(self.sizes.values())

    @cached_property
    def starts(self) -> dict[Unit, int]:
        """The position of each unit's first sample."""
        return dict(zip(self.sizes, itertools.accumulate(self.sizes.values(), initial=0)))

    def span(self, unit: Unit) -> tuple[int, int]:
        """Return the first sample of a unit and how many it has, none of one that is not known."""
        micro_batch, place = unit
        units = [unit] if place != EVERY_PLACE else [u for u in self.sizes if u[0] == micro_batch]
        sizes = [self.sizes[member] for member in units if member in self.sizes]
        return (self.starts[units[0]], sum(sizes)) if sizes else (0, 0)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of one step on both sides, and which sample is which."""

    ref: StepSamples
    test: StepSamples
    partner: Array
    """[samples of the test] positions among the reference's, -1 for those it has not."""
    is_by_order: bool = False
    lost: int = 0
    unknown: int = 0
    repeated: int = 0
    are_apart: bool = False
    """True where other ranks have what is lost, which should have what these have."""

    @property
    def are_of_other_samples(self) -> bool:
        """True where one side has a sample that the other has not."""
        return bool(self.lost or self.unknown)

    @property
    def _is_without_partner(self) -> Array:
        """[samples of the test] True for those the reference has not."""
        if self.unknown == len(self.partner):  # then partners are those of the order
            return np.ones(len(self.partner), bool)
        without: Array = self.partner < 0
        return without

    def unknown_in(self, samples: StepSamples) -> int:
        """Return how many of the samples that this step of the reference has not are among those
        of another one."""
        others = match_samples(samples, self.test)
        if others.is_by_order or not self.unknown:
            return 0
        return int((self._is_without_partner & ~others._is_without_partner).sum())

    @property
    def is_known(self) -> bool:
        """False where only the order could tell the samples, and both runs have not as many: ranks
        hold parts of each sample, such as of its sequence."""
        return not self.is_by_order or self.ref.total == self.test.total

    @cached_property
    def is_in_order(self) -> bool:
        """True where the samples come in the reference's order."""
        return bool((self.partner == np.arange(len(self.partner))).all())

    @cached_property
    def are_the_same(self) -> bool:
        """True where each unit of the test works on the samples of the same unit, in order."""
        ref, test = self.ref, self.test
        is_same = ref.sizes == test.sizes
        if ref.keys is None or test.keys is None:
            is_same = (
                ref.micro_batches == test.micro_batches and ref.place_count == test.place_count
            )
        return is_same and self.is_in_order


# ---- who has which batch -------------------------------------------------------------------------


class Stage(NamedTuple):
    """Ranks that parameters connect: those that share none are stages of a pipeline."""

    ranks: Array
    parameters: list[HeldParameter]
    meshes: list[Mesh]
    """Along whose axes they may be data-parallel: the declared one, the largest of the parameters,
    and that of the ranks which began with the same."""


def stages_of(setup: StepView | None, world: int, declared: Mesh | None) -> list[Stage]:
    """Return the stages of a job, of ranks that hold a parameter."""
    if setup is None or world == 1:
        return []
    parameters = [v for v in setup.values(Phase.SETUP) if v.slot.startswith("param:")]
    stage = np.arange(world)
    for values in {values.ranks.tobytes(): values for values in parameters}.values():
        joined = np.isin(stage, stage[values.ranks])
        stage[joined] = stage[joined].min()
    replicas = InferredReplicas(setup).lines
    stages = []
    for number in np.unique([stage[values.ranks[0]] for values in parameters]):
        ranks = np.flatnonzero(stage == number)
        shared = [v for v in parameters if len(ranks) > 1 and np.isin(ranks, v.ranks).all()]
        every_held = (held_parameter(values.views) for values in shared)
        # what a DTensor is along axes that are not its own, its bytes do not tell
        parameters_held = [
            replace(parameter, prints={}) if parameter.placements else parameter
            for parameter in every_held
        ]
        all_ranks = frozenset(ranks.tolist())
        meshes = [largest_mesh(parameters_held, all_ranks)]
        if declared is not None and set(declared.ranks) == all_ranks:
            meshes.insert(0, declared)
        lines = [line for line in replicas if np.isin(line, ranks).all()]
        if lines and sum(map(len, lines)) == len(ranks) and len({*map(len, lines)}) == 1:
            table = np.stack(lines).T
            shape = (table.shape[0], table.shape[1])
            replica_mesh = Mesh(
                axes=("data", "beside"), shape=shape, ranks=tuple(table.ravel().tolist())
            )
            meshes.append(replica_mesh)
        stages.append(Stage(ranks, parameters_held, meshes))
    return stages


def data_places(stages: list[Stage], setup: StepView | None, step: StepView, world: int) -> Array:
    """Return [world] each rank's place along the data-parallel axes of its stage: those that
    `layout/infer.py` finds by parameters at setup and by the root's inputs in this step."""
    places = np.zeros(world, np.int64)
    wrappers = {w for call in (setup.calls if setup else ()) for w in call.node.wrappers}
    inputs = [
        prints_of(values.views)
        for call in step.trained_roots
        if not call.micro_batch
        for values in call.inputs
        if values.source != "dtensor"
    ]
    for stage in stages:
        prints = [by_rank for by_rank in inputs if by_rank.keys() >= set(stage.ranks.tolist())]
        for mesh in stage.meshes:
            facts = axes_of(mesh, stage.parameters, prints, wrappers)
            axes = [mesh.axes.index(axis_facts.axis) for axis_facts in facts if axis_facts.is_data]
            if axes:
                sizes = [mesh.shape[axis] for axis in axes]
                for at, rank in mesh.places():
                    places[rank] = np.ravel_multi_index([at[axis] for axis in axes], sizes)
                break
    return places


def places_by_inputs(step_view: StepView, world: int) -> Array:
    """Return [world] a place for each different input that ranks were handed, for ranks that
    nothing shows to be data-parallel. It is believed where the reference has these samples."""
    places = np.zeros(world, np.int64)
    entered = [
        values
        for call in step_view.trained_roots
        if not call.micro_batch
        for values in call.inputs
        if values.is_known.all() and (values.column("sample_row") >= 0).any()
    ]
    for values in sorted(entered, key=lambda values: not is_whole_number(values.dtype))[:1]:
        _, first, index = np.unique(values.hashes, return_index=True, return_inverse=True)
        in_rank_order = np.argsort(np.argsort(first))
        places[values.ranks] = in_rank_order[index.reshape(-1)]
    return places


# ---- samples -------------------------------------------------------------------------------------


def samples_of_step(step_view: StepView, places: Array, wholes: WholeValues) -> StepSamples:
    """Return the samples that the units of a step worked on."""
    roots = step_view.trained_roots
    micro_batches = sorted({call.micro_batch or 0 for call in roots})
    step_samples = StepSamples(
        places=places, place_count=int(places.max()) + 1, micro_batches=max(len(micro_batches), 1)
    )
    # the inputs that samples were sketched of, and whether each is of integers, which tell more
    slots: dict[str, bool] = {}
    for values in (values for call in roots for values in call.inputs):
        if (values.column("sample_row") >= 0).any():
            is_whole = any(is_whole_number(view.dtype) for view in values.views)
            slots[values.slot] = slots.get(values.slot, False) or is_whole
    if not slots:
        return step_samples
    step_samples.slot = max(slots, key=lambda slot: slots[slot])
    step_samples.is_of_integers = slots[step_samples.slot]
    keys_of: dict[Unit, Array] = {}
    having = (call for call in roots if step_samples.slot in call.slots)
    by_call = {call.micro_batch or 0: call.slots[step_samples.slot] for call in having}
    wholes_of_calls = wholes.of_all(by_call, places)
    step_samples.micro_batches = min(step_samples.micro_batches, max(len(wholes_of_calls), 1))
    for micro_batch, wholes_of_call in wholes_of_calls.items():
        if isinstance(wholes_of_call, str):
            continue
        views = by_call[micro_batch].views
        integers = [np.array(view.ranks) for view in views if is_whole_number(view.dtype)]
        # later stages of a pipeline received something else: the first stage is that of rank 0
        for index in sorted(
            range(len(wholes_of_call)),
            key=lambda position: int(wholes_of_call.members[position].min()),
        ):
            sketches, members = wholes_of_call.samples[index], wholes_of_call.members[index]
            unit = (micro_batch, max(int(wholes_of_call.places[index]), 0))
            is_handed = any(np.isin(members, ranks).all() for ranks in integers)
            if (
                sketches is not None
                and unit not in keys_of
                and (is_handed or not step_samples.is_of_integers)
            ):
                keys_of[unit] = sketches
                step_samples.elements = wholes_of_call.counts[index] / max(len(sketches), 1)
    if keys_of:
        step_samples.sizes = {unit: len(keys_of[unit]) for unit in sorted(keys_of)}
        step_samples.keys = np.concatenate([keys_of[unit] for unit in step_samples.sizes]).astype(
            np.float64
        )
    return step_samples


def match_samples(ref: StepSamples, test: StepSamples) -> Batches:
    """Return which sample of the reference each one of the test is.

    Where either trace kept no samples, ranks hold a part of each sample (of its sequence), or the
    numbers are too large to sketch, the order of micro-batches and ranks is believed.
    """
    if (
        ref.keys is None
        or test.keys is None
        or ref.elements != test.elements
        or not (np.isfinite(ref.keys).all() and np.isfinite(test.keys).all())
    ):
        order = np.arange(max(test.total, ref.total))
        return Batches(ref=ref, test=test, partner=order, is_by_order=True)
    allowed = _SAME_TOKENS if ref.is_of_integers and test.is_of_integers else _SAME_FLOATS
    sizes = [np.sqrt(np.mean(keys**2, axis=1)) for keys in (ref.keys, test.keys)]
    usual = max(float(np.median(sizes[0])), 1e-30)  # a sketch may be short by chance
    scales = allowed * np.maximum(sizes[1], usual)
    order = np.argsort(ref.keys[:, 0], kind="stable")
    first = ref.keys[order, 0]
    low = np.searchsorted(first, test.keys[:, 0] - 4 * scales, "left")
    high = np.searchsorted(first, test.keys[:, 0] + 4 * scales, "right")
    partner = np.full(len(test.keys), -1, np.int64)
    used = np.zeros(len(ref.keys), bool)
    repeated = 0
    for index, (start, stop, scale) in enumerate(zip(low.tolist(), high.tolist(), scales.tolist())):
        candidates = order[start:stop]
        unused = candidates[~used[candidates]]
        near = unused if len(unused) else candidates
        distances = np.sqrt(np.mean((ref.keys[near] - test.keys[index]) ** 2, axis=1))
        if distances.min(initial=np.inf) > scale:
            continue
        is_same_place = index in near and distances[near == index][0] <= scale
        # equal samples keep their order
        best = index if len(unused) and is_same_place else int(near[int(distances.argmin())])
        partner[index] = best
        repeated += not len(unused)
        used[best] = True
    lost, unknown = int((~used).sum()), int((partner < 0).sum())
    if unknown == len(partner):  # other data: what follows is compared in its order all the same
        partner = np.arange(len(partner)) % max(len(ref.keys), 1)
    return Batches(
        ref=ref, test=test, partner=partner, lost=lost, unknown=unknown, repeated=repeated
    )
