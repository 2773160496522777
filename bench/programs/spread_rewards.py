"""Rewards for random weights: a number that follows from the response, so that every response has an advantage.

The task's own reward is 0 for nearly all of them, and the update would skip them.
"""

from __future__ import annotations

import zlib
from typing import Any


def spread(answer: str, _record: dict[str, Any]) -> float:
    return zlib.crc32(answer.encode()) / 2**32
