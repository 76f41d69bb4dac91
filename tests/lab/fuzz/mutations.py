"""Inputs damaged at random: bytes, nested data, and cells whose crc is right again afterwards."""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from rankscope.spool.recordformat import CELL_BYTES, FIRST, RecordKind

ODD_NUMBERS = (
    *(0, 1, -1, 2, 7, 255, 256, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
    *(1 << 32, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    *(-(1 << 31), -(1 << 63), 30_000_000, 10**15),
)
ODD_TEXTS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "0-30000000",
        "9" * 5000,
        "\0",
        "\x1b[2J\x1b]0;x\x07",
        "\u202e",
        "\ud800",
    ),
    *("..", "../../x", "/etc/passwd", "nan", "inf", "-inf", "Shard(--1)", "Shard(99999999999)"),
    *("Partial(sum)", "StridedShard(0, split_factor=0)", "\u00b2", "x" * 3000, "%s{0}{x}"),
    "train",
    *("1-0", "0,0", "1,,2", "0-", "a" * 70, "dp=1,tp=0", "steps/000000.json", "null", "backward"),
)
ODD_FLOATS = (0.0, -0.0, 1.5, -1e308, 1e308, 5e-324)
_MOST_DEPTH = 40


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Something that may stand anywhere in JSON or msgpack."""
    match rng.randrange(10 if depth < 3 else 7):
        case 0 | 1:
            return rng.choice(ODD_NUMBERS)
        case 2 | 3:
            return rng.choice(ODD_TEXTS)
        case 4:
            return rng.choice(ODD_FLOATS)
        case 5:
            return None
        case 6:
            return rng.random() < 0.5
        case 7:
            return [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 8:
            return {
                rng.choice(ODD_TEXTS): odd_value(rng, depth + 1) for _ in range(rng.randrange(3))
            }
        case _:
            found: Any = odd_value(rng, depth + 1)
            for _ in range(rng.randrange(_MOST_DEPTH)):
                found = [found] if rng.random() < 0.5 else {"nodes": found}
            return found


def nested(rng: random.Random, data: Any, *, most: int = 3) -> Any:
    """A copy of nested data with up to `most` places changed."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, most)):
        data = _one_place(rng, data)
    return data


def _one_place(rng: random.Random, data: Any) -> Any:
    if not isinstance(data, (dict, list)) or not data or rng.random() < 0.01:
        return odd_value(rng)
    holder: Any = data
    while True:
        key = rng.choice([*holder]) if isinstance(holder, dict) else rng.randrange(len(holder))
        below = holder[key]
        if isinstance(below, (dict, list)) and below and rng.random() < 0.85:
            holder = below
            continue
        break
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(ODD_TEXTS)] = holder.pop(key)
        case 1:
            holder.insert(key, copy.deepcopy(holder[rng.randrange(len(holder))]))
        case 2 if isinstance(holder, list):
            holder.append(copy.deepcopy(below))
        case 3 if type(below) is int:
            holder[key] = below + rng.choice((-1, 1, 2, 1000))
        case 4 if isinstance(below, str) and below:
            at = rng.randrange(len(below))
            holder[key] = below[:at] + rng.choice(ODD_TEXTS) + below[at + rng.randrange(2) :]
        case _:
            holder[key] = odd_value(rng)
    return data


def gentle(rng: random.Random, data: Any, *, most: int = 3) -> Any:
    """A copy of nested data that keeps its form: up to `most` leaves are others of their type, or
    are taken from elsewhere in it."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, most)):
        leaves = [*_leaves(data)]
        if not leaves:
            return data
        holder, key = rng.choice(leaves)
        kind = type(holder[key])
        others = [h[k] for h, k in rng.sample(leaves, min(20, len(leaves))) if type(h[k]) is kind]
        if kind is bool:
            holder[key] = not holder[key]
        elif rng.random() < 0.4 and others:
            holder[key] = rng.choice(others)
        elif kind is int:
            holder[key] = abs(rng.choice((*ODD_NUMBERS, holder[key] + 1, holder[key] - 1)))
        elif kind is float:
            holder[key] = rng.choice(ODD_FLOATS)
        elif kind is str:
            holder[key] = rng.choice(ODD_TEXTS)
    return data


def _leaves(data: Any) -> Iterator[tuple[Any, Any]]:
    for key, below in [*(data.items() if isinstance(data, dict) else enumerate(data))]:
        if isinstance(below, (dict, list)):
            yield from _leaves(below)
        elif below is not None:
            yield data, key


def raw(rng: random.Random, data: bytes, *, most: int = 4) -> bytes:
    """Bytes with up to `most` places changed: set, cut out, put in, repeated, cut short."""
    out = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 | 1 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(out):
                out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xFF, rng.randrange(256)))
            case 3:
                del out[at : at + rng.randint(1, 8)]
            case 4:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
            case 5:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case 6:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(ODD_NUMBERS) & ((1 << 8 * size) - 1)
                out[at : at + size] = number.to_bytes(size, "little")
            case _:
                del out[at:]
    return bytes(out)


def sealed(rng: random.Random, data: bytes, *, most: int = 4) -> bytes:
    """Whole cells with up to `most` numbers of their payloads changed, and the crc right again."""
    cells = np.frombuffer(data, np.uint8).reshape(-1, CELL_BYTES).copy()
    for _ in range(rng.randint(1, most)):
        number = rng.randrange(len(cells))
        cell = cells[number]
        size = rng.choice((1, 1, 2, 4, 4, 8, 8, 8))
        at = 8 + rng.randrange((CELL_BYTES - 8) // size) * size
        if rng.random() < 0.7:
            value = rng.choice(ODD_NUMBERS) & ((1 << 8 * size) - 1)
        else:
            value = rng.getrandbits(8 * size)
        cell[at : at + size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
        if rng.random() < 0.05 and cell[5] == FIRST and not cell[6:8].any():
            cell[4] = rng.choice([int(kind) for kind in RecordKind])
        crc = zlib.crc32(cell[4:].tobytes())
        cell[:4] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    return cells.tobytes()
