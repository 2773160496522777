"""A reward function that takes 50 ms, most of which it waits, as one that calls a service."""

from __future__ import annotations

import time
import zlib
from typing import Any

SECONDS = 0.05


def slow(answer: str, _record: dict[str, Any]) -> float:
    time.sleep(SECONDS)
    return zlib.crc32(answer.encode()) / 2**32
