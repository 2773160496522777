"""Shortages by family: a noun for memory beside a word of exhaustion, or what was wanted beside less that was there.

Programs word them in any way (`GPU heap full`, `no more VRAM`, `device arena exhausted: wanted 12 GiB, have 3 GiB`).
"""

from __future__ import annotations

import re

from rljob_memory.sizes import size_bytes

_SIZE = r"\d[\d.,]{0,11} ?(?:[KMGT]i?B|bytes|[KMGT]\b)"
_DEVICE = r"(?:gpu|cuda|device|video|graphics|accelerator|npu|tpu|hip|rocm)"
_DEVICE_MEMORY = (
    rf"(?:\b{_DEVICE}(?:'s)?[ _:-]?\d{{0,3}}[ _-](?:memory|mem|heap|arena|ram|pool|allocator)"
    r"|\b(?:device |gpu )?memory pool(?= \w+ on (?:device|gpu|cuda))|\bvram\b|\bhbm)"
)
_ANY_MEMORY = rf"(?:{_DEVICE_MEMORY}|\bmemory(?: pool| arena| heap| budget)?|\bram\b|\bheap|\barena)"
_IS = r"(?: (?:is|was|are|has been|became|got|now|completely|on \w+ ?:?\d*)){0,3}"
_GONE = (
    r"(?:full\b(?![- ]?(?:size|gc\b|precision|of\b|graph|finetun|fine))|exhausted|depleted|used up|ran out\b"
    r"|overflow(?:ed|s)?\b|maxed out)"
)
_NONE_LEFT = (
    r"(?:no (?:more|free|remaining|spare)|(?:ran |run |running )?out of(?! (?:range|bounds?|order|place))"
    r"|not? enough|insufficient|too little|lack of|exhausted)"
)
_NO_FAILURE_OF = r"(?! (?:leak|fragment|profil|usage|growth|pressure|bandwidth|alignment|access|disk|banks?))"
_CANNOT = r"(?:cannot|can't|can not|could not|unable to|fail\w* to)"
_OBTAIN = r"(?:be )?(?:reserve|map|commit|obtain|get|acquire|grow|expand|extend|alloc\w*|fit|place|hold|satisfy)"


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_OF_A_DEVICE = _any_of(
    rf"{_DEVICE_MEMORY}{_IS} {_GONE}",
    rf"\b{_NONE_LEFT} (?:\w+ ){{0,2}}?{_DEVICE_MEMORY}\b{_NO_FAILURE_OF}",
    rf"\bno {_DEVICE_MEMORY} (?:is |was )?(?:left|available|remaining|free)\b",
    rf"\b{_DEVICE} ?\d{{0,3}} has no (?:more |free )?memory\b",
)
_OF_ANY = _any_of(
    rf"{_ANY_MEMORY}{_IS} {_GONE}",
    rf"\b{_NONE_LEFT} (?:\w+ ){{0,2}}?{_ANY_MEMORY}\b{_NO_FAILURE_OF}",
    r"\bno memory (?:is |was )?(?:left|available|remaining|free)\b",
    rf"\b(?:allocat\w+|reserv\w+|alloc|mmap|malloc) (?:of )?{_SIZE}.{{0,60}}\bfail",
    rf"\b{_CANNOT} (?:\w+ )?{_OBTAIN}\b.{{0,50}}(?:\bmemory\b|\bheap\b|{_SIZE})",
)
_WANTED = rf"\b(?:want\w*|need\w*|requir\w*|request\w*|asked|asking)(?: for| of)?\W{{1,3}}(?P<wanted>{_SIZE})"
_WANTED_AND_HAD = (
    re.compile(rf"{_WANTED}.{{0,40}}\b(?:have|has|had|got|only|just|free)\b.{{0,20}}?(?P<had>{_SIZE})", re.IGNORECASE),
    re.compile(rf"{_WANTED}.{{0,20}}?(?P<had>{_SIZE}) (?:\w+ )?(?:free|available|left|remain)", re.IGNORECASE),
)
_OTHER_MEMORY = _any_of(
    r"\b(?:replay|experience|episodic|rollout|chat|conversation|agent|shared|long[- ]term) (?:memory|buffer)\b",
    r"\bfull gc\b|\b(?:cpu|gpu)s? (?:are |is )?available",
)


def shortage_of_a_device(text: str) -> re.Match[str] | None:
    """The words that report that a device has no memory left, which are a report without any word of a failure."""
    found = _OF_A_DEVICE.search(text)
    return None if found is None or _OTHER_MEMORY.search(text) else found


def shortage(text: str) -> re.Match[str] | None:
    """The words for a shortage of any memory; they report one only beside a word of a failure."""
    found = _OF_ANY.search(text) or _less_than_wanted(text)
    return None if found is None or _OTHER_MEMORY.search(text) else found


def _less_than_wanted(text: str) -> re.Match[str] | None:
    for pattern in _WANTED_AND_HAD:
        found = pattern.search(text)
        if found and (size_bytes(found["wanted"]) or 1) > (size_bytes(found["had"]) or 0):
            return found
    return None
