"""A line of any length is read in time that grows with its length alone: patterns do not look through all of it."""

from __future__ import annotations

from io import BytesIO
from time import process_time

import pytest

from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.evidence.plain_lines import LONGEST_LINE_BYTES

SLOW_SECONDS = 4.0
"""A quadratic pattern took 10 to 100 s of the first five lines; all of them now take less than 0.3 s."""


@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        ("", "gpu memory "),
        ("RuntimeError: out of memory ", "1234567890"),
        ("", "alloc 1 "),
        ("Tried to allocate 2.00 GiB. ", "load_"),
        ("", "need 12 GiB have "),
        ("out of memory ", "mem: 12 "),
        ('  File "x.py", line 3, in ', "memory "),
    ],
)
def test_a_long_line_of_equal_words_is_read_quickly(start: str, repeated: str) -> None:
    line = start + repeated * ((LONGEST_LINE_BYTES - len(start)) // len(repeated) - 1)
    began = process_time()
    LogReader(EvidenceBuilder()).read(BytesIO(f"{line}\n".encode()))
    assert process_time() - began < SLOW_SECONDS
