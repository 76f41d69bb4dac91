"""Declared layouts: the TOML file in which a user says how tensors lie that no DTensor describes.

    axes = "dp=1,tp=2"                 # row-major over the ranks
    [[layout]]
    path = "layers.*.attn.o_proj"      # fnmatch on the canonical path
    slot = "output"                    # input, output: every slot of that kind; param:<name> ...
    placements = { tp = "Replicate()" }

    [[layout]]
    path = "personal_head"
    slot = "param:*"
    own = true                         # another one on each rank, on purpose: held to no other rank

An axis that no entry names for a slot is not described there. Several entries may describe one slot
together; two that place it differently along one axis contradict each other, and both are named.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from rankscope.errors import LayoutError, os_errors_as
from rankscope.globs import glob_matches, slot_matches
from rankscope.layout.placement import Mesh, Placement, PlacementKind, parse_placement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SIZE = re.compile(r"[1-9][0-9]{0,8}")
_KEYS: Final = (frozenset({"path", "slot", "placements"}), frozenset({"path", "slot", "own"}))
_KINDS: Final = ("input", "output")
_MOST_BYTES: Final = 1 << 20


def described_as(slot: str) -> str:
    """Return `param:` and input or output for the slot of a gradient; any other slot is its own."""
    if slot.startswith("grad:"):
        return f"param:{slot[5:]}"
    return slot.removeprefix("grad_") if slot.startswith(("grad_input", "grad_output")) else slot


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEntry:
    """One `[[layout]]`."""

    number: int
    path: str
    slot: str
    placements: Mapping[str, Placement]
    is_own: bool = False
    """Each rank has another one on purpose."""

    def describes(self, path: str, slot: str) -> bool:
        """True where the entry describes this slot of this path."""
        if not glob_matches(self.path, path):
            return False
        if self.slot in _KINDS:
            return described_as(slot).split(".")[0] == self.slot
        return slot_matches(self.slot, slot)

    def __str__(self) -> str:
        listed = ", ".join(f"{axis} = {place}" for axis, place in self.placements.items())
        return f"entry {self.number} (path {self.path!r}, slot {self.slot!r}: {listed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFile:
    """The declarations of one file."""

    name: str
    text: str
    axes: Mapping[str, int]
    entries: tuple[LayoutEntry, ...]

    @classmethod
    def load(cls, path: Path) -> LayoutFile:
        """Read a file. Raises LayoutError with the place of the fault."""
        trouble = os_errors_as(LayoutError, f"layout file {path}: cannot be read")
        with trouble, path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise LayoutError(f"layout file {path}: is larger than {_MOST_BYTES} bytes")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise LayoutError(f"layout file {path}: is not UTF-8 text: {error}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "layout") -> LayoutFile:
        """Read a file's text. Raises LayoutError with the name of the faulty entry."""
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # its own error is a ValueError
            raise LayoutError(f"layout file {name}: is not TOML: {error}") from error
        unknown = sorted(set(content) - {"axes", "layout"})
        if unknown:
            raise LayoutError(
                f"layout file {name}: no key {unknown[0]!r} is known; write axes and [[layout]]"
            )
        axes = _axes(content.get("axes"), name)
        listed = content.get("layout", [])
        if not isinstance(listed, list):
            raise LayoutError(f"layout file {name}: write [[layout]] with two brackets")
        entries = tuple(
            _entry(number, table, axes, f"layout file {name}: entry {number}")
            for number, table in enumerate(listed, 1)
        )
        return cls(name=name, text=text, axes=axes, entries=entries)

    @property
    def size(self) -> int:
        """How many ranks the axes are for."""
        return prod(self.axes.values())

    def mesh(self, world_size: int) -> Mesh:
        """Return the declared axes over all ranks. Raises LayoutError for a run of another size."""
        if self.size != world_size:
            listed = ",".join(f"{axis}={extent}" for axis, extent in self.axes.items())
            raise LayoutError(
                f"layout file {self.name}: axes {listed} are those of {self.size} ranks, the run "
                f"had {world_size}"
            )
        return Mesh(
            axes=tuple(self.axes), shape=tuple(self.axes.values()), ranks=tuple(range(world_size))
        )

    def placements(self, path: str, slot: str) -> dict[str, Placement]:
        """Return {axis: placement} of a slot, {} if no entry describes it. Raises LayoutError with
        both names if two entries place it differently."""
        by_axis: dict[str, tuple[Placement, LayoutEntry]] = {}
        for entry in self.entries:
            if not entry.describes(path, slot):
                continue
            for axis, placement in entry.placements.items():
                first = by_axis.setdefault(axis, (placement, entry))
                if first[0] != placement:
                    raise LayoutError(
                        f"layout file {self.name}: {first[1]} and {entry} give "
                        f"{path or '(root)'}:{slot} different placements along {axis}"
                    )
        return {axis: placement for axis, (placement, _) in by_axis.items()}

    def is_own(self, path: str, slot: str) -> bool:
        """True where each rank has another one on purpose: a gradient as its parameter."""
        owned = [entry for entry in self.entries if entry.is_own]
        slots = {slot, described_as(slot)}
        return any(entry.describes(path, name) for entry in owned for name in slots)


def _axes(text: object, name: str) -> dict[str, int]:
    message = f'layout file {name}: axes = {text!r}: write axes = "dp=1,tp=2", outermost first'
    if not isinstance(text, str):
        raise LayoutError(message)
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if not axis or not _SIZE.fullmatch(size) or axis in axes:
            raise LayoutError(message)
        axes[axis] = int(size)
    return axes


def _entry(number: int, data: Any, axes: Mapping[str, int], where: str) -> LayoutEntry:
    if not isinstance(data, dict) or set(data) not in _KEYS:
        keys = ", ".join(sorted(data)) if isinstance(data, dict) else data
        raise LayoutError(
            f"{where} has {keys or 'nothing'}: write path, slot and placements, or own = true"
        )
    path, slot, texts = data["path"], data["slot"], data.get("placements")
    if not isinstance(path, str) or not isinstance(slot, str):
        raise LayoutError(f"{where}: path and slot are texts")
    path = "" if path == "(root)" else path
    if "own" in data:
        if data["own"] is not True:
            raise LayoutError(f"{where}: own can only be true")
        return LayoutEntry(number=number, path=path, slot=slot, placements={}, is_own=True)
    if not isinstance(texts, dict) or not texts:
        raise LayoutError(f'{where}: write placements = {{ tp = "Replicate()" }}')
    placements = {}
    for axis, text in texts.items():
        if axis not in axes:
            raise LayoutError(f"{where}: no axis {axis!r} among {', '.join(axes)}")
        try:
            placement = parse_placement(text) if isinstance(text, str) else None
        except LayoutError as error:
            raise LayoutError(f"{where}: {axis} = {text!r}: {error}") from error
        if placement is None or placement.kind is PlacementKind.OTHER:
            raise LayoutError(
                f"{where}: {axis} = {text!r} is not a placement: write Replicate(), Shard(0), "
                f"StridedShard(0, split_factor=2) or Partial(sum)"
            )
        placements[axis] = placement
    return LayoutEntry(number=number, path=path, slot=slot, placements=placements)


def layout_of_run(run: Mapping[str, Any]) -> tuple[LayoutFile, Mesh] | str | None:
    """Return the layout file in a run header with its axes over all ranks; a text if it is
    unusable, or None without a file (or with one rank, which holds everything whole)."""
    declared = run.get("layout")
    if declared is None or int(run["world_size"]) < 2:
        return None
    try:
        layouts = LayoutFile.parse(str(declared["text"]), str(declared["file"]))
        return layouts, layouts.mesh(int(run["world_size"]))
    except LayoutError as error:
        return f"{error}; it is not used"
