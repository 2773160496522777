"""Inputs of a fuzzer: valid documents that are damaged, as bytes or as JSON values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

HOSTILE: list[Any] = [
    *(0, 1, -1, 7, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**400),
    *(0.5, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("nan")),
    *(
        "",
        "a",
        "\x00",
        "\u2028",
        "é" * 5000,
        "A" * 70_000,
        "=",
        "1e999",
        "0x10",
        "null",
        "~",
        "!!python/object:os.system",
    ),
    *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-02-30T00:00:00Z", "2026-01-01"),
    *(None, True, [], {}, [[]], [{}] * 300, {"": {}}, {f"k{index}": index for index in range(500)}),
]
"""Values at the limits of a type, and beyond."""

_LEVELS = (3, 150, 1_500, 20_000)
_PLACEHOLDER = "to be replaced by deep JSON"
_LARGEST = 2_000_000


def damaged(seeds: Sequence[bytes], random: Random) -> bytes:
    """One of `seeds`, damaged as bytes or as JSON; rarely anything."""
    match random.randrange(20):
        case 0:
            return random.randbytes(random.randrange(200))
        case number if number < 9:
            return _damaged_json(seeds, random)
    return _damaged_bytes(seeds, random)


def _damaged_bytes(seeds: Sequence[bytes], random: Random) -> bytes:
    text = bytearray(random.choice(seeds))
    for _ in range(random.randint(1, 6)):
        at = random.randint(0, len(text))
        match random.randrange(7):
            case 0:
                del text[at:]
            case 1:
                text[at : at + 1] = random.randbytes(random.randint(1, 4))
            case 2:
                value = random.choice(HOSTILE)
                text[at:at] = (json.dumps(value) if random.randrange(2) else str(value)).encode()
            case 3:
                other = random.choice(seeds)
                text[at:] = other[random.randint(0, len(other)) :]
            case 4:
                text[at:at] = bytes(text[at : at + random.randrange(200)]) * random.choice([1, 2, 50])
            case 5:
                del text[at : at + random.randint(1, 40)]
            case 6 if random.randrange(8) == 0:
                text[at:at] = _deep(random).encode()
    return bytes(text[:_LARGEST])


def _damaged_json(seeds: Sequence[bytes], random: Random) -> bytes:
    """A seed in which values are replaced, left out or added; the seed as bytes if it is not JSON."""
    text = random.choice(seeds)
    try:
        document = json.loads(text)
    except ValueError:
        return _damaged_bytes(seeds, random)
    for _ in range(random.randint(1, 4)):
        document = _changed(document, random)
    changed = json.dumps(document)
    return (changed.replace(f'"{_PLACEHOLDER}"', _deep(random)) if _PLACEHOLDER in changed else changed).encode()


def _changed(value: Any, random: Random) -> Any:
    if not value or not isinstance(value, dict | list) or random.randrange(7) == 0:
        return _PLACEHOLDER if random.randrange(30) == 0 else _any_value(random)
    if isinstance(value, list):
        index = random.randrange(len(value))
        return [*value[:index], _changed(value[index], random), *value[index + 1 :]]
    name = random.choice(sorted(value))
    match random.randrange(10):
        case 0:
            return {key: below for key, below in value.items() if key != name}
        case 1:
            return value | {"x" * random.randrange(80): _any_value(random)}
    return value | {name: _changed(value[name], random)}


def _any_value(random: Random, levels: int = 3) -> Any:
    match random.randrange(6 if levels else 3):
        case 0:
            return random.randint(-10, 10_000)
        case 3:
            return [_any_value(random, levels - 1) for _ in range(random.randrange(4))]
        case 4:
            return {f"k{index}": _any_value(random, levels - 1) for index in range(random.randrange(4))}
    return random.choice(HOSTILE)


def _deep(random: Random) -> str:
    levels = random.choice(_LEVELS)
    return random.choice(["[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels, "[" * levels])
