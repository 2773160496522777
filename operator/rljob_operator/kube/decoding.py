"""JSON from the API server as dictionaries: large documents in a thread, deep ones without their deepest levels."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic_core import from_json

MAX_LEVELS = 190
"""Levels of a document that are kept; `from_json` raises ValueError above 200."""

NESTED_TOO_DEEPLY = "rljob.dev/nested-too-deeply"
"""Key of the object that replaces a value below MAX_LEVELS."""

_PLACEHOLDER = b'{"%s":true}' % NESTED_TOO_DEEPLY.encode()
_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)
"""A bracket, or a string, in which brackets do not count."""

_LARGE_BYTES = 64 << 10
"""Size above which a document is decoded in a thread. A large pod takes 20 ms, and many of them arrive at once: on the
event loop, nothing else would run until all have been decoded."""

_decoder = ThreadPoolExecutor(1, "decoder")
"""One thread: several would compete with the event loop for the interpreter."""


async def decode(data: bytes) -> Any:
    """The document, up to MAX_LEVELS levels of it. Raises ValueError if it is not JSON.

    The API server stores objects that are nested up to 10,000 levels deep in fields without a schema, such as pod
    templates. Python's json module raises RecursionError at about 990 levels, and code that walks such an object does
    too. Here, everything deeper than MAX_LEVELS is replaced by a placeholder, so that the rest of the document can be
    used: a page with one such object still has all its objects, and that object still has its name and its status.
    """
    if len(data) < _LARGE_BYTES:
        return _decoded(data)
    return await asyncio.get_running_loop().run_in_executor(_decoder, _decoded, data)


def _decoded(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return from_json(prune(data))  # about 1 s for the largest possible object


def prune(data: bytes) -> bytes:
    """The JSON document with a placeholder in place of each object and array below MAX_LEVELS."""
    kept, level, start = list[bytes](), 0, 0
    for found in _BRACKET.finditer(data):
        match data[found.start()]:
            case 0x7B | 0x5B:  # { [
                level += 1
                if level == MAX_LEVELS + 1:
                    kept += (data[start : found.start()], _PLACEHOLDER)
            case 0x7D | 0x5D:  # } ]
                level -= 1
                if level == MAX_LEVELS:
                    start = found.end()
    kept.append(data[start:])
    return b"".join(kept)
