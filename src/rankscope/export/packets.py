"""The few messages of Perfetto's trace format that a timeline needs, written by hand.

Fields are numbered as in perfetto's protos/perfetto/trace/*.proto, whose numbers never change. A
file is a sequence of packets; every packet here says that its time is wall-clock time.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

Argument = bool | int | float | str | Mapping[str, "Argument"]
_REALTIME = 1
_SEQUENCE = 1
_EXPLICIT = 3
"""Tracks of a process in the order of their ranks, not by name."""
_VARINT, _FIXED64, _BYTES = 0, 1, 2


def clock(time_ns: int) -> bytes:
    """Return the packet that makes wall-clock time the time of the file."""
    reading = _number(1, _REALTIME) + _number(2, time_ns)
    return _packet(_bytes(6, _bytes(1, reading) + _number(2, _REALTIME)))


def process(uuid: int, pid: int, name: str) -> bytes:
    """Return the packet that describes a process."""
    described = _number(1, pid) + _bytes(6, _text(name))
    return _packet(_bytes(60, _number(1, uuid) + _bytes(3, described) + _number(11, _EXPLICIT)))


def track(uuid: int, parent: int, name: str, place: int) -> bytes:
    """Return the packet that describes a track of a process."""
    described = _number(1, uuid) + _bytes(2, _text(name)) + _number(5, parent)
    return _packet(_bytes(60, described + _number(12, place)))


def begin(uuid: int, time_ns: int, content: bytes) -> bytes:
    """Return the packet that begins a slice; `content` is what `arguments` makes."""
    return _event(uuid, time_ns, 1, content)


def end(uuid: int, time_ns: int) -> bytes:
    """Return the packet that ends the innermost slice of a track."""
    return _event(uuid, time_ns, 2, b"")


def instant(uuid: int, time_ns: int, content: bytes) -> bytes:
    """Return the packet of something that has no duration."""
    return _event(uuid, time_ns, 3, content)


def arguments(name: str, category: str, values: Mapping[str, Argument]) -> bytes:
    """Return the content of an event; behind it further arguments may be appended, made the same
    way with empty name and category."""
    head = _bytes(23, _text(name)) if name else b""
    head += _bytes(22, _text(category)) if category else b""
    return head + b"".join(_bytes(4, _argument(key, value)) for key, value in values.items())


def _argument(name: str, value: Argument) -> bytes:
    head = _bytes(10, _text(name))
    if isinstance(value, bool):
        return head + _number(2, int(value))
    if isinstance(value, int):
        return head + _number(4, value)
    if isinstance(value, float):
        return head + _varint(5 << 3 | _FIXED64) + struct.pack("<d", value)
    if isinstance(value, str):
        return head + _bytes(6, _text(value))
    return head + b"".join(_bytes(11, _argument(key, each)) for key, each in value.items())


def _event(uuid: int, time_ns: int, kind: int, content: bytes) -> bytes:
    event = _bytes(11, _number(9, kind) + _number(11, uuid) + content)
    return _packet(_number(8, time_ns) + _number(58, _REALTIME) + event)


def _packet(body: bytes) -> bytes:
    return _bytes(1, body + _number(10, _SEQUENCE))


def _text(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(content)) + content


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
