"""Which layout file speaks for the values of a trace: the one given now, else the trace's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankscope.layout.layoutfile import LayoutFile, layout_given
from rankscope.layout.placement import LayoutSource, Mesh, Placement

if TYPE_CHECKING:
    from rankscope.tree.views import Value

__all__ = ["GivenLayouts"]


class GivenLayouts:
    """What a layout file says of the values of one run."""

    def __init__(self, run: Mapping[str, Any], layouts: LayoutFile | None) -> None:
        """Choose the file.

        Args:
            run: header of the run.
            layouts: the file given now; it replaces all of the one given at trace time.

        Raises:
            LayoutError: the file given now is of a run of another size.
        """
        self.mesh: Mesh | None = None
        """The declared axes over all ranks; None where no file applies."""
        self.unused = ""
        """Why the trace's own file is of no use; "" where it is, or is not asked."""
        self._layouts = layouts
        self._who = ""
        own = layout_given(run)
        if layouts is None or (isinstance(own, tuple) and own[0].text == layouts.text):
            if isinstance(own, tuple):
                self._layouts, self.mesh = own
                self._who = f"{self._layouts.name}, given at trace time,"
            self.unused = own if isinstance(own, str) else ""
            return
        world = int(run["world_size"])
        self.mesh = layouts.mesh(world) if world > 1 else None
        self._who = f"{layouts.name}, given afterwards,"
        if "layout" in run:
            before = f"{run['layout']['file']}, which was given at trace time"
            self._who = f"{layouts.name}, given afterwards in place of {before},"

    def of(self, value: Value) -> tuple[dict[str, Placement], Sequence[str]]:
        """Return {axis: placement} of a value that no DTensor describes, {} where the file says
        nothing of it, and what is to be said of that.

        Raises:
            LayoutError: two entries place it differently; names both.
        """
        if self._layouts is None or self.mesh is None:
            return {}, [self.unused] if self.unused else []
        found = self._layouts.placements(value.node.path, value.views[0].slot)
        if found:
            listed = ", ".join(f"{axis}={place}" for axis, place in found.items())
            return found, [f"placed as {self._who} declares it: {listed}"]
        if any(view.source is LayoutSource.DECLARED for view in value.views):
            return {}, [f"{self._who} says nothing of it"]
        return {}, []
