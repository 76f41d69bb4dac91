"""Which layout file speaks for the values of a trace: the one given now, else the trace's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankscope.errors import LayoutError
from rankscope.record.layoutfile import LayoutFile
from rankscope.record.placement import LayoutSource, Mesh, Placement

if TYPE_CHECKING:
    from rankscope.tree.views import Value

__all__ = ["GivenLayouts", "layout_given"]


def layout_given(run: Mapping[str, Any]) -> tuple[LayoutFile, Mesh] | str | None:
    """Return the layout file in a run header with its axes over all ranks; in words why it is of no
    use, or None where there is none (or one rank, which holds everything whole)."""
    said = run.get("layout")
    if said is None or int(run["world_size"]) < 2:
        return None
    try:
        layouts = LayoutFile.parse(str(said["text"]), str(said["file"]))
        return layouts, layouts.mesh(int(run["world_size"]))
    except LayoutError as error:
        return f"{error}; it is not used"


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
