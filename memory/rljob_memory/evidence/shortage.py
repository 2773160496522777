"""Recognizes a report that memory ran out, in the words of any program or person, so that no log gets an empty answer.

A report has a noun for memory next to a word of exhaustion (`GPU heap full`, `no more VRAM`), or less than was wanted
(`wanted 12 GiB, have 3 GiB`). Advice, questions, code and shortages that the program handled are no reports.
"""

from __future__ import annotations

import re
from functools import cache

from rljob_memory.evidence.signatures import load_table, pattern
from rljob_memory.sizes import size_bytes

_SENTENCES = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])")
_FEW_WORDS = 6
"""A sentence of no more words, such as a title, is a report without a verb."""
_LONGEST_TEXT = 2_000


@cache
def _words() -> tuple[bytes, ...]:
    return tuple(word.encode() for word in load_table("wordings.yaml")["report_words"])


def reported_shortage(text: str) -> str | None:
    """The sentence of `text` that reports that memory ran out; None if there is none."""
    text = text[:_LONGEST_TEXT]
    if not may_report(text.encode("utf-8", "replace")):
        return None
    if not pattern("shortage").search(text) and not pattern("less").search(text):
        return None
    if pattern("code").search(text):
        return None
    return next((part.strip() for part in _SENTENCES.split(text) if _is_report(part)), None)


def may_report(raw: bytes) -> bool:
    """False if the line has no word that a report of a shortage has."""
    lower = raw.lower()
    return any(word in lower for word in _words())


def is_advice(text: str) -> bool:
    """True if the words are those of advice, or of a shortage that the program handled."""
    return pattern("no_report").search(text) is not None


def is_of_the_gpu(text: str) -> bool | None:
    """True if a report of a shortage names the memory of a GPU, False if it names that of the host; else None."""
    host = pattern("host").search(text) is not None
    if pattern("gpu").search(text) and not (host and not re.search(r"gpu|cuda|vram|显存", text, re.IGNORECASE)):
        return True
    return False if host else None


def _is_report(sentence: str) -> bool:
    if not (pattern("shortage").search(sentence) or _is_less_than_wanted(sentence)) or is_advice(sentence):
        return False
    return "?" not in sentence and (
        len(sentence.split()) <= _FEW_WORDS or pattern("report").search(sentence) is not None
    )


def _is_less_than_wanted(text: str) -> bool:
    found = pattern("less").search(text)
    if found is None or not pattern("have").search(text):
        return False
    return (size_bytes(found["wanted"]) or 0) > (size_bytes(found["had"]) or 0)
