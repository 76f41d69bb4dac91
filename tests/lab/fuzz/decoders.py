"""Every decoder of what comes from outside, with sound inputs and what is done with damaged ones.

A decoder takes one damaged input. It may raise a `RankscopeError`; anything else that leaves it is
a fault, and so are a minute of work and half a gigabyte of memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from rankscope.cli.app import main
from rankscope.companion.protocol import decode, encode
from rankscope.companion.replica import read_host_states
from rankscope.companion.running.splitstream import StreamTail
from rankscope.compat.debugger.filetrace import trace_of_files
from rankscope.diagnosis.comparison.diff import diff
from rankscope.errors import RankscopeError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.layout.placement import parse_placement
from rankscope.record.notes import Note
from rankscope.record.ranks import StreamId, parse_ranks
from rankscope.record.stepselection import StepSelection
from rankscope.run.agreements import Order, sightings
from rankscope.run.folders import (
    FINDINGS_NAME,
    HOST_STATE_PREFIX,
    INDEX_NAME,
    ORDER_SEEN_PREFIX,
    REPLICA_FOLDER,
    RUN_NAME,
    STEPS_FOLDER,
    TRACE_NAME,
    RunHeader,
    read_run_header,
    write_run_header,
)
from rankscope.run.jobstatus import stalls_in
from rankscope.settings import SETTINGS
from rankscope.spool.chunks.chunkfiles import parse_header
from rankscope.spool.recordcolumns import COLUMNS, read_ending, records
from rankscope.spool.recordformat import DEFINITION_LENGTH, decode_definition
from rankscope.spool.replicas import (
    SettledPrefix,
    read_end,
    read_settled,
    settled_to,
    write_settled,
)
from rankscope.tree.assembly.rankstreams import StreamBytes, definitions_in, read_stream
from rankscope.tree.assembly.sources import find_streams
from rankscope.tree.build import assemble, write_trace
from rankscope.tree.growingtree import GrowingTree, trace_of
from rankscope.tree.reader import open_trace
from rankscope.tree.views import Trace
from rankscope.words.joblines import told_in
from tests.companion.test_protocol import MESSAGES
from tests.lab.fuzz import samples
from tests.lab.fuzz.mutations import gentle, nested, raw, sealed

Take = Callable[[Any], object]


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """One decoder under damage."""

    name: str
    make: Callable[[random.Random], Iterator[Any]]
    """Yields damaged inputs for ever."""
    take: Take
    share: float
    """Of all inputs of a run."""


def _some(rng: random.Random, sound: list[Any], damage: Callable[[random.Random, Any], Any]) -> Any:
    while True:
        yield damage(rng, rng.choice(sound))


# ---- records ------------------------------------------------------------------------------------


def _definitions(rng: random.Random) -> Iterator[bytes]:
    sound = list(samples.definitions())
    while True:
        fields = rng.choice(sound)
        if rng.random() < 0.8:
            yield samples.packed(nested(rng, fields, most=2))
        else:
            yield raw(rng, msgpack.packb(fields))


def _redefined(rng: random.Random) -> Iterator[bytes]:
    """Streams of which one definition in ten, or a few numbers of records, are changed."""
    sound = samples.small_stream()

    def one_in_ten(fields: dict[str, Any]) -> dict[str, Any] | None:
        damage = rng.choice((gentle, nested))
        return damage(rng, fields, most=2) if rng.random() < 0.1 else None

    while True:
        if rng.random() < 0.6:
            yield samples.redefined(sound, one_in_ten)
        else:
            yield sealed(rng, sound, most=20)


def _take_definition(packed: bytes) -> None:
    decode_definition(DEFINITION_LENGTH.pack(len(packed)) + packed)


def _columns(cells: bytes) -> None:
    found = records(cells)
    for kind in COLUMNS:
        found.columns(kind)
    found.values()
    found.definitions()
    read_ending(found)


def _stream(cells: bytes) -> None:
    tail = StreamTail(has_values=True)
    found = records(cells)
    tail.take(found, definitions_in(found, {})[0])
    read_stream(StreamBytes(stream=StreamId(rank=0, incarnation=0), data=cells))


def _tree(cells: bytes) -> None:
    """Build the trace of the stream beside a sound one, and hold what is written to the schema."""
    (_, other) = find_streams([samples.job("by_hand")])
    own = StreamBytes(stream=StreamId(rank=0, incarnation=0), data=cells)
    document = assemble([own, other])
    assert {rank["rank"] for rank in document.run["ranks"]} == {0, 1}
    _walk(trace_of(document, Path("memory")))
    out = _fresh("built")
    out.mkdir()
    write_trace(document, out)
    _walk(open_trace(out))


# ---- messages and small things ------------------------------------------------------------------


def _messages(rng: random.Random) -> Iterator[list[bytes]]:
    sound = [encode(message) for message in MESSAGES]
    while True:
        parts = list(rng.choice(sound))
        header, how = parts[0][:-4], rng.random()
        if how < 0.6:
            header = samples.packed(nested(rng, msgpack.unpackb(header), most=2))
        elif how < 0.9:
            header = raw(rng, header)
        parts[0] = header + zlib.crc32(header).to_bytes(4, "little")
        if rng.random() < 0.1:
            parts[0] = raw(rng, parts[0])
        if len(parts) > 1 and rng.random() < 0.3:
            parts[1] = raw(rng, parts[1])
        if rng.random() < 0.05:
            parts += [rng.randbytes(9)] * rng.randrange(3)
        yield parts


_TEXTS: tuple[tuple[str, Take], ...] = (
    ("Shard(1)", parse_placement),
    ("StridedShard(0, split_factor=2)", parse_placement),
    ("0-3,8,10-12", parse_ranks),
    (Order(number=5, steps=3, paths=("a.*",), tensors=("b:output",)).text, Order.read),
    ('axes = "dp=1,tp=2"\n[[layout]]\npath = "a"\nslot = "output"\n'
     'placements = { tp = "Shard(0)" }\n', LayoutFile.parse),
    ("train steps 3-4 of 40000 were asked for", Note.read),
    ("0-2,10,every:100,last:20,watch:a.*:output", StepSelection.parse),
    *((each.default or "1", each.parse) for each in SETTINGS),
)  # fmt: skip


def _texts(rng: random.Random) -> Iterator[tuple[str, Take]]:
    while True:
        text, take = rng.choice(_TEXTS)
        yield raw(rng, text.encode()).decode(errors="surrogateescape"), take


def _facts(rng: random.Random) -> Iterator[Any]:
    sound = [{"kind": "no_step_begun", "steps": "40000"}, {"kind": "missed_step", "step": 3}]
    yield from _some(rng, sound, nested)


def _chunk_headers(rng: random.Random) -> Iterator[tuple[bytes, int]]:
    (path, *_) = sorted((samples.tree("by_hand") / "tensors").glob("*/*.safetensors"))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for text in _json_texts(rng, [json.loads(data[8 : 8 + length])]):
        yield text, len(data) - 8 - length


def _json_texts(rng: random.Random, sound: list[Any]) -> Iterator[bytes]:
    while True:
        data = rng.choice(sound)
        if rng.random() < 0.8:
            yield _json_bytes(nested(rng, data))
        else:
            yield raw(rng, _json_bytes(data))


def _json_bytes(data: Any) -> bytes:
    return json.dumps(data).encode(errors="surrogatepass")


def _index_lines(rng: random.Random) -> Iterator[bytes]:
    index = samples.growing_tree("ddp") / STEPS_FOLDER / INDEX_NAME
    yield from _json_texts(rng, [json.loads(line) for line in index.read_text().splitlines()])


# ---- small files --------------------------------------------------------------------------------


def _place() -> Path:
    folder = samples.scratch() / "small"
    (folder / REPLICA_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / "stalls").mkdir(exist_ok=True)
    return folder


def _small_files(rng: random.Random) -> Iterator[tuple[Path, bytes, Take]]:
    """Yield where, what and who reads it."""
    folder = _place()
    replica = folder / REPLICA_FOLDER / "rank00000.0.cells"
    header = RunHeader(run_id="r", out=folder, collector="", world_size=2, settings={"a": "b"})
    write_run_header(folder, header)
    (stalls,) = samples.tree("by_hand").glob("stalls/*.json")
    finding = {
        "format": "rankscope.findings/1", "kind": "replica-mismatch", "ranks": [0, 1],
        "text": "x", "found": "2026-01-01T00:00:00+00:00", "step_ended": "2026-01-01T00:00:00Z",
        "others": [{"path": "a", "slot": "b"}],
    }  # fmt: skip
    order = {"number": 5, "host": "h", "ranks": [0], "told": ""}
    state = {"beat": 3, "job": "running", "max_restarts": 0}
    files: list[tuple[Path, Any, Take]] = [
        (replica.with_suffix(".json"), {"committed": 640, "end": "exit"},
         lambda _: read_end(replica)),
        (folder / RUN_NAME, json.loads((folder / RUN_NAME).read_text()),
         lambda _: read_run_header(folder)),
        (folder / "stalls" / stalls.name, json.loads(stalls.read_text()),
         lambda _: stalls_in(folder)),
        (folder / FINDINGS_NAME, finding, lambda _: told_in(folder)),
        (folder / REPLICA_FOLDER / f"{ORDER_SEEN_PREFIX}0.json", order,
         lambda _: sightings(folder, 5)),
        (folder / REPLICA_FOLDER / f"{HOST_STATE_PREFIX}0.json", state,
         lambda _: read_host_states(folder)),
    ]  # fmt: skip
    streams = [(path, next(_json_texts(rng, [data])), take) for path, data, take in files]
    assert streams
    settled = folder / REPLICA_FOLDER / "rank00001.0.cells"
    settled.write_bytes(bytes(640))
    write_settled(settled, SettledPrefix(640, bytes(range(64)) * 2, 3))
    head = settled.with_suffix(".settled").read_bytes()

    def read_both(_: object) -> None:
        with contextlib.suppress(RankscopeError):
            settled_to(settled)
        read_settled(settled)

    while True:
        if rng.random() < 0.15:
            data = bytearray(raw(rng, head))
            if rng.random() < 0.5 and len(data) >= 40:  # its own crc right again
                data[36:40] = zlib.crc32(bytes(data[:36])).to_bytes(4, "little")
            yield settled.with_suffix(".settled"), bytes(data), read_both
        else:
            path, sound, take = rng.choice(files)
            yield path, next(_json_texts(rng, [sound])), take


def _take_small_file(found: tuple[Path, bytes, Take]) -> None:
    path, data, take = found
    path.write_bytes(data)
    take(path)


def _value_files(rng: random.Random) -> Iterator[bytes]:
    data = (samples.tree("ddp") / "steps" / "000000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    while True:
        if rng.random() < 0.7:
            text = _json_bytes(nested(rng, header))
            yield len(text).to_bytes(8, "little") + text + data[8 + length :]
        else:
            yield raw(rng, data[: 8 + length]) + data[8 + length :]


def _take_values(data: bytes) -> None:
    base, folder = samples.tree("ddp"), samples.scratch() / "steps-of-a-trace"
    if not folder.exists():
        shutil.copytree(base, folder)
    (folder / "steps" / "000000.safetensors").write_bytes(data)
    _walk(open_trace(folder))


# ---- whole traces, through the commands ---------------------------------------------------------


def _fresh(name: str) -> Path:
    folder = samples.scratch() / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


Damaged = tuple[Path, dict[str, bytes], list[str]]
"""A sound trace folder, files in it that are replaced, and what is done with it."""

_COMMANDS = (
    ["show"], ["show", "--full"], ["show", "--path", "*", "--rank", "1"], ["verify"],
    ["verify", "--json"], ["check"], ["check", "--json"], ["check", "--full"], ["layout"],
    ["export", "--format", "jsonl", "--out", "OUT"],
    ["export", "--format", "perfetto", "--out", "OUT"],
    ["report", "--out", "OUT"], ["tensor"], ["tensor", "feed.up:output"],
    ["tensor", "feed.up:output", "--global", "--print"],
    ["diff", "SOUND"], ["recover", "--out", "OUT"], ["top", "--once"],
)  # fmt: skip


def _traces(rng: random.Random) -> Iterator[Damaged]:
    whole = samples.tree("by_hand")
    compact = samples.compact_tree("by_hand")
    growing = samples.growing_tree("ddp")
    while True:
        command = list(rng.choice(_COMMANDS))
        kind = rng.random()
        base = whole if kind < 0.5 else compact if kind < 0.75 else growing
        if command[0] == "recover":
            base = growing
        yield base, dict([_damaged_file(rng, base)]), command


def _damaged_file(rng: random.Random, base: Path) -> tuple[str, bytes]:
    files = sorted(p for p in base.rglob("*") if p.is_file() and p.stat().st_size)
    if rng.random() < 0.5:
        heads = [p for p in files if p.name in (TRACE_NAME, INDEX_NAME) or p.suffix == ".json"]
        files = heads or files
    path = rng.choice(files)
    data = path.read_bytes()
    name = str(path.relative_to(base))
    if path.suffix == ".json" and rng.random() < 0.9:
        return name, _json_bytes(rng.choice((gentle, nested))(rng, json.loads(data)))
    if path.suffix == ".jsonl":
        lines = data.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = next(_json_texts(rng, [json.loads(lines[at])]))
        return name, b"\n".join(lines) + b"\n"
    if path.suffix == ".cells":
        return name, (sealed if rng.random() < 0.7 else raw)(rng, data)
    if path.suffix == ".safetensors" and rng.random() < 0.6:
        length = int.from_bytes(data[:8], "little")
        text = _json_bytes(rng.choice((gentle, nested))(rng, json.loads(data[8 : 8 + length])))
        return name, len(text).to_bytes(8, "little") + text + data[8 + length :]
    return name, raw(rng, data)


def _take_trace(found: Damaged) -> None:
    base, files, command = found
    folder = _fresh("damaged")
    shutil.copytree(base, folder)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    run_command(command, folder)


def run_command(command: list[str], folder: Path) -> str:
    """Run one command on a folder in this process; return what it printed.

    It has to end as documented, and print nothing that moves a terminal's cursor.
    """
    out = _fresh("out")
    sound = samples.tree("by_hand")
    words = [str(out) if w == "OUT" else str(sound) if w == "SOUND" else w for w in command]
    words.insert(1, str(folder))
    printed, said = io.StringIO(), io.StringIO()
    code: Any = None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as leaving:
            code = leaving.code
    assert code in (0, 1, 2, None), f"{words}: exit code {code!r}"
    if code == 2:
        lines = said.getvalue().strip().splitlines()
        assert lines and lines[-1].startswith("rankscope: "), said.getvalue()[-400:]
    text = printed.getvalue() + said.getvalue()
    assert not UNPRINTABLE.search(text), f"{words}: {UNPRINTABLE.search(text)!r}"
    return text


UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def _golden(rng: random.Random) -> Iterator[bytes]:
    """Damaged golden traces, packed again."""
    raw_bytes = lzma.decompress(samples.golden("by_hand").read_bytes())
    line, _, rest = raw_bytes.partition(b"\n")
    head = json.loads(line)
    while True:
        damage = rng.choice((gentle, nested))
        if rng.random() < 0.8:
            data = _json_bytes(damage(rng, head)) + b"\n" + rest
        else:
            data = raw(rng, raw_bytes)
        packed = lzma.compress(data, preset=0)
        yield packed if rng.random() < 0.9 else raw(rng, packed)


def _take_golden(data: bytes) -> None:
    path = _place() / "golden.xz"
    path.write_bytes(data)
    found = open_trace(path, takes_golden=True)
    for node in found.walk():
        _ = (node.key, node.ranks, [(view.layout(), view.per_rank()) for view in node.slots])
    diff(found, open_trace(samples.tree("by_hand")))


def _debugger_trees(rng: random.Random) -> Iterator[bytes]:
    """Damaged trees of a module debugger, of printed values."""
    numbers = dict.fromkeys(("mean", "std", "min", "max"), "tensor(2.3276e-01)")
    value = {"shape": "torch.Size([2, 4])", "dtype": "torch.float32", "value": ["["], **numbers}
    sound = {
        "module_path": "Net",
        "inputs": {"args": [value], "kwargs": {"mask": {**value, "nan": 1}}},
        "outputs": [value, {"kept": {**value, "placements": {"tp": "Shard(1)"}}}],
        "children": [{"module_path": "Net.fc", "inputs": {"args": [value]}, "outputs": value}],
        "error": "ValueError: no",
    }
    while True:
        damaged = rng.choice((gentle, nested))(rng, sound)
        yield _json_bytes(damaged) if rng.random() < 0.8 else raw(rng, _json_bytes(sound))


def _take_debugger_tree(data: bytes) -> None:
    folder = _fresh("debugger")
    folder.mkdir(parents=True)
    (folder / "Net_debug_tree_FULL_TENSORS.json").write_bytes(data)
    found = trace_of_files(folder, lambda what, part: None)
    diff(found, found)


def _opened(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    head = json.loads((samples.tree("by_hand") / TRACE_NAME).read_bytes())
    while True:
        yield TRACE_NAME, _json_bytes(rng.choice((gentle, nested))(rng, head))


def _take_opened(found: tuple[str, bytes]) -> None:
    name, data = found
    folder = samples.scratch() / "opened"
    if not folder.exists():
        shutil.copytree(samples.tree("by_hand"), folder)
    (folder / name).write_bytes(data)
    _walk(open_trace(folder))


def _walk(trace: Trace) -> None:
    """Read everything of a trace that there is to read."""
    assert (
        trace.state and repr(trace) and trace.error_notes is not None and trace.happened is not None
    )
    for node in trace.walk():
        _ = (node.key, node.ranks, node.outcomes, node.errors, node.time, node.collectives)
        for view in node.slots:
            _ = (view.layout(), view.folds, view.combined, view.per_rank(), view.samples())
            _ = (view.shapes(), view.references(), view.not_kept)
            for rank in view.ranks[:4]:
                view.ranges(rank)


DECODERS = (
    Decoder(name="definitions", make=_definitions, take=_take_definition, share=0.45),
    Decoder(
        name="cells",
        make=lambda rng: _some(rng, [samples.small_stream()[:2048]], raw),
        take=_columns,
        share=0.01,
    ),
    Decoder(
        name="records",
        make=lambda rng: _some(rng, [samples.small_stream()], sealed),
        take=_stream,
        share=0.001,
    ),
    Decoder(
        name="built",
        make=_redefined,
        take=_tree,
        share=4e-05,
    ),
    Decoder(name="messages", make=_messages, take=decode, share=0.4),
    Decoder(name="texts", make=_texts, take=lambda pair: pair[1](pair[0]), share=0.06),
    Decoder(name="facts", make=_facts, take=lambda fact: Note.read("", fact), share=0.02),
    Decoder(
        name="chunk-headers",
        make=_chunk_headers,
        take=lambda given: parse_header(*given),
        share=0.01,
    ),
    Decoder(
        name="index",
        make=_index_lines,
        take=lambda line: _index_line(line.decode(errors="replace")),
        share=0.01,
    ),
    Decoder(name="small-files", make=_small_files, take=_take_small_file, share=0.015),
    Decoder(name="values", make=_value_files, take=_take_values, share=0.001),
    Decoder(name="opened", make=_opened, take=_take_opened, share=0.0002),
    Decoder(name="golden", make=_golden, take=_take_golden, share=0.0001),
    Decoder(name="debugger", make=_debugger_trees, take=_take_debugger_tree, share=0.0001),
    Decoder(name="commands", make=_traces, take=_take_trace, share=0.00012),
)


def _index_line(line: str) -> None:
    folder = _fresh("index") / "steps"
    folder.mkdir(parents=True)
    (folder / "index.jsonl").write_text(f"{line}\n")
    tree = GrowingTree(folder.parent)
    assert all(entry["rows"] for entry in tree.entries())
