"""The files that the debugger of transformers writes, from a trace that kept full tensors.

    Net_debug_tree_FULL_TENSORS.json   module calls as they nest: inputs of all, outputs of leaves
    Net_debug_tree_SUMMARY.json        the same without the tensors' values
    Net.fc_inputs_args_0.safetensors   one for each tensor, where they are not written as text

A further forward of the same model and every rank that is not the only one have files of their own:
`Net_debug_tree_rank1_1_...`. docs/commands/export.md has the names.

A trace has every call; the files have those of modules that the model holds, inputs of all, outputs
of those that hold no others. What `prune` leaves out is left out before any tensor is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope.errors import FolderError, SelectionError
from rankscope.export.formats import ExportPlace, Selection
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.run.folders import TRACE_NAME, Progress
from rankscope.spool.chunks.safetensors import write_tensor
from rankscope.tree.slotview import SlotView, by_slot
from rankscope.tree.views import Node, Step, Trace

if TYPE_CHECKING:
    from rankscope.compat.debugger.values import GlobalValues, LocalValues, Shown


_NUMBERED: Final = re.compile(r"(.*)\.(\d+)$")
_LOOSE: Final = "@"
"""Begins the path of a module that its root does not hold."""


@dataclass(slots=True, eq=False)
class _ForwardCall:
    """One call of one module, by one rank or by all together, with the entries of its slots."""

    node: Node
    name: str
    """Class of the model, then the path of the module: `Net.layers.0`."""
    stem: str
    """Begins the names of its tensors' files: unlike `name` it differs from call to call."""
    inputs: Mapping[str, Any]
    """{"args": [forms], "kwargs": {name: form}}, forms as in docs/trace-format.md."""
    output: Any
    """Form of what `forward` returned; None where that is not known."""
    returned: Any
    """Form of what the caller got, where the module's own hooks made something else of it."""
    holds_others: bool
    error: str
    children: list[_ForwardCall]
    views: dict[str, list[SlotView]] = field(default_factory=dict)


def forwards(
    steps: Sequence[Step], rank: int | None, roots: Callable[[Node], bool]
) -> Iterator[Node]:
    """Yield the calls of a model (`roots`) in the order of time, one step in memory."""

    def found(step: Step) -> list[Node]:
        return [
            node
            for node in step.passing()
            if node.phase is Phase.FORWARD and (rank is None or rank in node.ranks) and roots(node)
        ]

    opened, nodes, places = -1, list[Node](), list[tuple[int, float, int, int]]()
    for number, step in enumerate(steps):
        if step.is_setup:
            continue
        opened, nodes = number, found(step)
        places += (
            (step.incarnation, node.time.start_us, number, place)
            for place, node in enumerate(nodes)
        )
    for _, _, number, place in sorted(places):
        if number != opened:
            opened, nodes = number, found(steps[number])
        yield nodes[place]


class _CallReader:
    """Reads the calls of one forward, of one rank or of all (None); `mark` is in its files'
    names."""

    def __init__(self, root: Node, rank: int | None, mark: str) -> None:
        self._rank = rank
        self._class = root.class_name
        self._root = root.path
        self._mark = mark

    def call(self, node: Node) -> _ForwardCall:
        """Return a call, that of the model or one inside it, with every call in it."""
        below = node.path[len(self._root) + 1 :] if self._root else node.path
        path = f".{below}" if node.path != self._root else ""
        suffix = f"_{node.ordinal}" if node.ordinal and path else ""
        views = by_slot(v for v in node.slots if self._rank is None or self._rank in v.ranks)
        children = [self.call(child) for child in self._below(node)]
        inputs, holds_others = self._inputs(views, bool(children))
        return _ForwardCall(
            node=node,
            name=f"{self._class}{path}",
            stem=f"{self._class}{self._mark}{path}{suffix}",
            inputs=inputs,
            output=self._output(views),
            returned=_nested("returned", self._leaves(views, "returned")),
            holds_others=holds_others,
            error=self._error(node),
            children=children,
            views=views,
        )

    def _below(self, node: Node) -> Iterator[Node]:
        """Yield the calls inside one; of a module that nobody holds those inside it instead."""
        for child in node.children:
            is_seen = self._rank is None or self._rank in child.ranks
            if (
                not is_seen
                or child.phase is not Phase.FORWARD
                or child.status == CallStatus.NOT_ENTERED.word
            ):
                continue
            if self._is_held(child.path):
                yield child
            else:
                yield from self._below(child)

    def _is_held(self, path: str) -> bool:
        if self._root:
            return path.startswith(f"{self._root}.") or path == self._root
        return not path.startswith(_LOOSE)

    def _inputs(
        self, views: Mapping[str, list[SlotView]], has_children: bool
    ) -> tuple[Mapping[str, Any], bool]:
        recorded = self._form(views, "form:input")
        if recorded is not None:
            arguments = {name: recorded[name] for name in ("args", "kwargs")}
            return arguments, recorded["modules"] > 0
        guessed = _nested("input", self._leaves(views, "input")) or []
        items = guessed.get("items", {}) if isinstance(guessed, dict) else dict(enumerate(guessed))
        args = [form for name, form in items.items() if str(name).isdecimal()]
        kwargs = {str(name): form for name, form in items.items() if not str(name).isdecimal()}
        return {"args": args, "kwargs": kwargs}, has_children

    def _output(self, views: Mapping[str, list[SlotView]]) -> Any:
        form = self._form(views, "form:output")
        return _nested("output", self._leaves(views, "output")) if form is None else form

    def _form(self, views: Mapping[str, list[SlotView]], slot: str) -> Any:
        for view in views.get(slot, ()):
            for fold in view.pieces:
                if self._rank is None or self._rank in fold.ranks:
                    return json.loads(fold.note or "null")
        return None

    def _leaves(self, views: Mapping[str, list[SlotView]], kind: str) -> dict[str, Any]:
        """Return {slot: form}, for a trace in which no forms were asked for."""
        leaves: dict[str, Any] = {}
        for slot, entries in views.items():
            if slot == kind or slot.startswith(f"{kind}."):
                is_text = entries[0].dtype == "python"
                leaves[slot] = entries[0].folds[0].note if is_text else {"slot": slot}
        return leaves

    def _error(self, node: Node) -> str:
        for outcome in node.outcomes:
            if not outcome.has_returned and (self._rank is None or self._rank in outcome.ranks):
                return outcome.error or outcome.status.replace("_", " ")
        return ""


def _nested(prefix: str, leaves: Mapping[str, Any]) -> Any:
    """Return the form that slots make: a list where their names are numbers from 0; None for
    none."""
    if not leaves:
        return None
    if set(leaves) == {prefix}:
        return leaves[prefix]
    groups: dict[str, dict[str, Any]] = {}
    for slot, leaf in leaves.items():
        name = slot[len(prefix) + 1 :].split(".")[0]
        groups.setdefault(name, {})[slot] = leaf
    forms = {name: _nested(f"{prefix}.{name}", group) for name, group in groups.items()}
    is_list = list(forms) == [str(number) for number in range(len(forms))]
    return list(forms.values()) if is_list else {"items": forms}


def _prune_layers(call: _ForwardCall) -> None:
    """Leave the first and the last of each list of layers, here and below."""
    lists: dict[str, list[_ForwardCall]] = {}
    for child in call.children:
        match = _NUMBERED.match(child.name)
        if match and any(f".{match[2]}." in inner.name for inner in child.children):
            lists.setdefault(match[1], []).append(child)
    dropped = {layer for layers in lists.values() for layer in layers[1:-1]}
    call.children = [child for child in call.children if child not in dropped]
    for child in call.children:
        _prune_layers(child)


_MOST_NAME: Final = 200  # bytes of a file's name before its suffix; file systems take 255
_quoted: Final = json.encoder.encode_basestring_ascii
_TREE: Final = re.compile(r"(.+)_debug_tree(?:_rank(\d+))?(?:_(\d+))?_FULL_TENSORS\.json")
_UNSAFE: Final = {ord(char): f"%{ord(char):02X}" for char in "/\\%\0\n\r"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """How the files are written: pruned of inner layers, with all outputs, with the rank in
    names."""

    prunes: bool = True
    as_text: bool = True
    """Values as lines of `print`; else a safetensors file for each."""
    all_outputs: bool = False
    label: str = ""


def write(
    trace: Trace,
    selection: Selection,
    place: ExportPlace,
    progress: Progress,
    *,
    is_global: bool = False,
    layout: LayoutFile | None = None,
    all_layers: bool = False,
    all_outputs: bool = False,
    safetensors: bool = False,
) -> Sequence[str]:
    """Write the files of every rank that is selected, or of all ranks together."""
    from rankscope.compat.debugger.values import GlobalValues, LocalValues

    steps = [step for step in selection.groups(trace) if not step.is_setup]
    ranks = sorted(selection.ranks(trace))
    files = Files(prunes=not all_layers, as_text=not safetensors, all_outputs=all_outputs)
    names: list[str] = []
    notes: dict[str, None] = {}
    for done, rank in enumerate([None] if is_global else ranks):
        progress("writing forwards", done / len(ranks))
        values: GlobalValues | LocalValues
        if rank is None:
            values = GlobalValues(trace, layout, as_text=files.as_text)
        else:
            values = LocalValues(trace, rank, as_text=files.as_text)
        label = "" if rank is None or len(ranks) == 1 else f"_rank{rank}"
        names += write_rank(place.target, steps, values, replace(files, label=label), rank=rank)
        notes.update(dict.fromkeys(values.notes))
    if not names:
        raise SelectionError("the trace holds no forward of a model in what is asked for")
    return (f"{len(names) // 2} forwards, a pair of files for each", *notes)


def write_rank(
    folder: Path,
    steps: Sequence[Step],
    values: LocalValues | GlobalValues,
    files: Files,
    *,
    rank: int | None,
    is_root: Callable[[Node], bool] | None = None,
) -> list[str]:
    """Write the forwards of one model on one rank (None: of all together) into `folder`, where
    files of the same names are replaced; return the names of the JSON files. `is_root` is None
    where the model is the trace's own root."""
    written: list[str] = []
    is_root = is_root or (lambda node: not node.path)
    for number, root in enumerate(forwards(steps, rank, is_root)):
        mark = f"{files.label}_{number}" if number else files.label
        call = _CallReader(root, rank, mark).call(root)
        if files.prunes:
            _prune_layers(call)
        written += _Writer(folder, values, files).write(call, f"{root.class_name}_debug_tree{mark}")
    return written


def trees_in(place: Path) -> list[Path]:
    """Return the trees that a debugger wrote into a folder, in the order of the forwards, or the
    one that is named; [] without one, and for a trace.

    Raises:
        FolderError: they are of several models or ranks.
    """
    if (place / TRACE_NAME).exists():
        return []
    files = [place] if place.is_file() else [*place.glob("*_FULL_TENSORS.json")]
    matches = [(match, file) for file in files if (match := _TREE.fullmatch(file.name))]
    whose = {f"{match[1]} of rank {match[2]}" if match[2] else match[1] for match, _ in matches}
    if len(whose) > 1:
        raise FolderError(
            f"{place}: holds files of several models or ranks ({', '.join(sorted(whose))})",
            "name one of its *_FULL_TENSORS.json, or keep those of each in a folder",
        )
    return [file for _, file in sorted(matches, key=lambda pair: int(pair[0][3] or 0))]


class _FileEntry(dict[str, Any]):
    """What stands for a tensor."""


class _Writer:
    def __init__(self, folder: Path, values: LocalValues | GlobalValues, files: Files) -> None:
        self._folder = folder
        self._values = values
        self._files = files
        self._used: set[str] = set()
        self._written: dict[tuple[object, str, tuple[int, ...]], str] = {}

    def write(self, call: _ForwardCall, base: str) -> list[str]:
        texts = _json(self._node(call, is_root=True), "\n")
        names = [f"{_safe(base)}_FULL_TENSORS.json", f"{_safe(base)}_SUMMARY.json"]
        for name, text in zip(names, texts):
            draft = self._folder / f".{name}.{os.getpid()}.new"
            try:
                draft.write_text(text, encoding="utf-8")
                os.replace(draft, self._folder / name)
            finally:
                draft.unlink(missing_ok=True)
        return names

    def _node(self, call: _ForwardCall, *, is_root: bool = False) -> dict[str, Any]:
        inputs = {
            kind: self._data(
                call, {"items": forms} if kind == "kwargs" else forms, f"_inputs_{kind}"
            )
            for kind, forms in call.inputs.items()
            if forms or is_root
        }
        node: dict[str, Any] = {"module_path": call.name, "inputs": inputs}
        is_shown = is_root or not call.holds_others or self._files.all_outputs
        if self._files.all_outputs or not call.children:
            node["outputs"] = self._data(call, call.output, "_outputs") if is_shown else None
        if is_root and not node.get("outputs"):
            node.pop("outputs", None)
        if call.returned is not None and self._values.is_changed(call.views):
            node["returned"] = self._data(call, call.returned, "_returned")
        if call.children:
            node["children"] = [self._node(child) for child in call.children]
        if call.error:
            node["error"] = call.error
        return node

    def _data(self, call: _ForwardCall, form: Any, place: str) -> Any:
        if isinstance(form, list):
            return [self._data(call, part, f"{place}_{i}") for i, part in enumerate(form)]
        if not isinstance(form, dict):
            return form
        if "items" in form:
            items = form["items"].items()
            return {key: self._data(call, part, f"{place}_{key}") for key, part in items}
        value = self._values.shown_tensor(call.node, call.views.get(form["slot"], ()), form)
        if value is None:
            return _FileEntry(shape=None, dtype=None, value=None, note="it was not recorded")
        return _FileEntry(
            shape=f"torch.Size({list(value.shape)})",
            dtype=f"torch.{value.dtype}",
            value=self._value(value, f"{call.stem}{place}"),
            **value.facts,
        )

    def _value(self, value: Shown, stem: str) -> Any:
        if self._files.as_text:
            return None if value.lines is None else list(value.lines)
        if value.data is None:
            return None
        name = self._free(_safe(stem))
        path, identity = f"{self._folder}/{name}", (value.origin, value.dtype, value.shape)
        written = None if value.origin is None else self._written.setdefault(identity, path)
        unchanged = None if written == path else written
        write_tensor(path, value.dtype, value.shape, value.data, unchanged)
        return f"./{name}"

    def _free(self, stem: str) -> str:
        name, number = f"{stem}.safetensors", 1
        while name in self._used:
            name, number = f"{stem}~{number}.safetensors", number + 1
        self._used.add(name)
        return name


def _safe(name: str) -> str:
    """Return a name as a file may have it: `/` and others as %2F, a long one cut, with its hash."""
    safe = name.translate(_UNSAFE).encode("utf-8", "backslashreplace")
    if len(safe) <= _MOST_NAME:
        return safe.decode()
    digest = hashlib.sha256(safe).hexdigest()[:16]
    return f"{safe[: _MOST_NAME - 17].decode(errors='ignore')}~{digest}"


def _json(data: Any, line: str) -> tuple[str, str]:
    """Return data as `json.dumps(data, indent=2)` writes it, and the same without the values of
    tensors. (`json` has no C code for indented text: it takes eight times as long.)"""
    inner = line + "  "
    comma = "," + inner
    if isinstance(data, str):
        text = _quoted(data)
    elif isinstance(data, dict) and data:
        parts = [(key, f"{_quoted(key)}: ", *_json(value, inner)) for key, value in data.items()]
        left_out = "value" if isinstance(data, _FileEntry) else None
        full_text = comma.join(name + text for _, name, text, _ in parts)
        short_text = comma.join(name + text for key, name, _, text in parts if key != left_out)
        return f"{{{inner}{full_text}{line}}}", f"{{{inner}{short_text}{line}}}"
    elif isinstance(data, list) and data:
        if all(type(value) is str for value in data):
            text = f"[{inner}{comma.join(map(_quoted, data))}{line}]"
        else:
            full_text, short_text = map(comma.join, zip(*(_json(value, inner) for value in data)))
            return f"[{inner}{full_text}{line}]", f"[{inner}{short_text}{line}]"
    else:
        text = json.dumps(data)
    return text, text
