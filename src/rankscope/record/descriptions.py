"""What modules are called and what tensors are, told once in a step and named by many rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleName:
    """What one rank calls one module."""

    path: str
    raw_path: str
    class_name: str
    wrappers: tuple[str, ...]
    opaque: bool

    def as_fields(self) -> dict[str, Any]:
        """Return how a step says it; the path stands in the node."""
        return {
            "class": self.class_name,
            "raw_path": self.raw_path,
            "wrappers": list(self.wrappers),
            "opaque": self.opaque,
        }

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ModuleName:
        """Return the name of `as_fields`, without a path.

        Raises:
            KeyError, TypeError, ValueError: the fields are not those of one.
        """
        return cls(
            path="",
            raw_path=str(fields["raw_path"]),
            class_name=str(fields["class"]),
            wrappers=tuple(map(str, fields["wrappers"])),
            opaque=bool(fields["opaque"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What one rank holds in a slot, without its numbers."""

    dtype: str
    """torch's name without the prefix, or "python"."""
    device: str
    """Kind of device, without its index."""
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None
    source: str
    """Where the layout comes from: word of a `LayoutSource`."""
    mesh: str = ""
    """Kind of mesh, as the run header names it; "" where the layout is unknown."""
    placements: tuple[tuple[str, str], ...] = ()
    ranges: tuple[_Ranges, ...] | None = None
    note: str | None = None
    """Bounded repr of what is no tensor, or why a tensor was not digested."""
    requires_grad: bool = False

    @property
    def shared(self) -> dict[str, object]:
        """What the ranks of a slot agree on, unless they hold different things."""
        return {
            "dtype": self.dtype,
            "device": self.device,
            "global_shape": self.global_shape,
            "source": self.source,
            "mesh": self.mesh,
            "placements": self.placements,
        }

    @property
    def local(self) -> tuple[object, ...]:
        """Ranks that differ in this hold different pieces of the same thing."""
        return self.shape, self.ranges, self.note, self.requires_grad

    def as_fields(self) -> dict[str, Any]:
        """Return how a step says it: what does not apply is left out."""
        found: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "shape": list(self.shape),
            "global_shape": None if self.global_shape is None else list(self.global_shape),
            "source": self.source,
        }
        if self.mesh:
            found |= {"mesh": self.mesh, "placements": dict(self.placements)}
        if self.ranges is not None:
            found["ranges"] = [[list(each) for each in dim] for dim in self.ranges]
        if self.note is not None:
            found["note"] = self.note
        if self.requires_grad:
            found["requires_grad"] = True
        return found

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> TensorFacts:
        """Return the facts of `as_fields`.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the fields are not those of one.
        """
        whole, ranges, note = fields["global_shape"], fields.get("ranges"), fields.get("note")
        return cls(
            dtype=str(fields["dtype"]),
            device=str(fields["device"]),
            shape=tuple(map(int, fields["shape"])),
            global_shape=None if whole is None else tuple(map(int, whole)),
            source=str(fields["source"]),
            mesh=str(fields.get("mesh", "")),
            placements=tuple((str(a), str(p)) for a, p in fields.get("placements", {}).items()),
            ranges=None if ranges is None else read_ranges(ranges),
            note=None if note is None else str(note),
            requires_grad=bool(fields.get("requires_grad", False)),
        )


def read_ranges(data: Any) -> tuple[_Ranges, ...]:
    """Return ranges as JSON holds them.

    Raises:
        TypeError, ValueError: they are none.
    """
    return tuple(tuple((int(a), int(b)) for a, b in dim) for dim in data)
