"""Reports that memory ran out, in words that no signature knows: so that no such log gets an empty answer."""

from __future__ import annotations

import re

from rljob_memory.sizes import size_bytes

_MEMORY_RAN_OUT = (
    r"out of (?!range|bounds?|order|place)(?:\w+ ){0,2}memory",
    r"out[-_]of[-_](?!range|bounds?)(?:\w+[-_])?memory",
    r"\bOutOf\w{0,20}Memory",
    r"\bRESOURCE_EXHAUSTED\b.{0,100}(?:memory|alloc)",
    r"\b(?:cuda|gpu|hip|npu|tpu|device|host|ram) oom\b",
    r"\boom (?:error|exception|occurred|happened|killed)\b",
    r"\b(?:not? enough|insufficient) (?:\w+ ){0,3}memory\b(?! (?:bandwidth|alignment|access|banks?))",
    r"\bmemory (?:is |was )?exhausted\b",
    r"\bexhausted (?:\w+ )?memory\b",
    r"\b(?:cannot|can't|can not|could not|unable to|failed to|failure to) (?:\w+ ){0,2}allocate\b"
    r".{0,80}(?:memory|bytes|[KMGT]i?B\b)",
    r"\bmemory allocation (?:.{0,60}fail|failure\b)",
    r"\bfailed to allocate again\b",
    r"\b(?:malloc|calloc|alloc)\(?\w*\)? failed\b",
    r"\blow on (?:\w+: )?memory\b",
    r"\bmemory limit (?:was |is |has been )?exceeded",
    r"\bexceed(?:s|ed|ing)? (?:the |its |job |step |container )*memory limit",
)
_AS_A_FAILURE = (
    r"\w(?:Error|Exception)\b",
    r"\b(?:error|exception|fatal|critical|killed)\b",
    r"\bfail(?:ed|ure)?\b",
    r"\babort",
    r"\bran out[- ]of[- ]",
    r"\bterminat",
    r"\bevict(?:ed|ing)",
    r"\bkilling\b",
    r"\bpanic",
    r"\b(?:cannot|can't|can not|could not|unable)\b",
    r"^\W{0,4}\w{0,20} ?out of ",
)
_ONLY_MENTIONED = (
    # advice
    r"\bif (?!self|not\b)\w",
    r"\b(?:avoid|prevent|potential|risk)",
    r"\b(?:may|might|can|would|could)\b(?! not|n?['’]t)",
    r"\b(?:in case|when|unless|without|likely)\b",
    r"\bpossibl[ey]\b",
    r"\b(?:usually|typically|often|generally) (?:due|caused|happens?|occurs?|means?|indicates?)\b",
    r"\b(?:tips?|hint):|\btroubleshooting\b",
    # the program handled it
    r"\b(?:handl(?:er|ing|e)|caught)\b",
    r"\b(?:catch|retry|retrie|skip|recover)",
    r"\bfalling back",
    r"\b(?:no|not) out of memory",
    # the loader's block for variables of threads, which has nothing to do with the amount of memory
    r"static TLS",
    # a list of changes
    r"\b(?:fix(?:e[sd])?|solve[sd]?|address(?:e[sd])?|closes?) (?:\S+ ){0,3}(?:OOM|out[ -]of[ -])",
)

_GPU = r"gpu(?!-(?:\d|\w*(?:node|worker|pod|pool|host)))"
"""Not in the name of a node or a pod."""
_OF_A_DEVICE = re.compile(
    rf"{_GPU}|cuda|c10::|显存|device|vram|hbm|accelerator|npu|tpu|^\W{{0,4}}OutOfMemoryError\s+Traceback",
    re.IGNORECASE,
)
_OF_THE_HOST = re.compile(
    r"\b(?:cpu|host|system|node|main)[ -](?:oom|out of memory|ram|memory|mem)\b|\bRAM\b|内存"
    # a killer of the host's, whatever the container is called
    r"|\b(?:container|pod|cgroup)\b.{0,60}\bkilled\b|\bkilled\b.{0,60}\b(?:container|pod|cgroup)\b",
    re.IGNORECASE,
)
_OF_THE_GPU = re.compile(rf"{_GPU}|cuda|vram|显存", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"Tried to allocate (?:<|\{|\.\.\.|[XN]{1,3}\b)")
_OTHER_LIMIT = re.compile(
    r"\bibv_\w+.{0,60}Cannot allocate memory|(?:\b(?:ERROR|FATAL):|errors\.OutOfMemory:) {1,2}out of shared memory"
)
"""Locked memory, which InfiniBand registers: `ulimit -l`. PostgreSQL's table of locks."""
_NOT_SCHEDULED = re.compile(r"\b\d+/\d+ nodes are available|\bFailedScheduling\b")
"""The scheduler's reasons: what a pod requests, and no node has left."""
_ON_THE_CHIP = re.compile(
    r"\bmemory space (?!hbm)\w*mem\b|\bscoped vmem\b|out of resources?: (?:shared|tensor) memory"
    r"|\bshared memory, Required",
    re.IGNORECASE,
)
"""Memory of a multiprocessor or a core, of XLA's and Triton's kernels: a tile is too large."""
_NOT_A_FAILURE = re.compile(
    r"#retracted_req|\bnot (?:an? )?(?:failure|error)\b|\bOOMs: {0,12}0\b|^oom(?:_\w{1,10})? 0$", re.IGNORECASE
)
_HANDLING = re.compile(r"^\s*(?:except\b|(?:el)?if\b.{0,80}\bisinstance\()")
"""Code that handles a shortage."""
_ADVICE = re.compile(
    r"\b(?:avoid|prevent|mitigat|troubleshoot)\w*\b|\bif (?:you|it|this|there|the|a)\b|\bin case\b|\btips?:"
    r"|\b(?:may|might|can|could|fix(?:e[sd])?)\b(?! not|n?['’]t)",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"`[^`]{0,60}(?:OOM|[Oo]ut[ _]?[Oo]f[ _]?[Mm]emory|137|Killed)[^`]{0,60}`")

_NO_SHORTAGES = (_PLACEHOLDER, _OTHER_LIMIT, _NOT_SCHEDULED, _ON_THE_CHIP, _NOT_A_FAILURE, _HANDLING)


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_RAN_OUT, _FAILURE, _MENTIONED = _any_of(_MEMORY_RAN_OUT), _any_of(_AS_A_FAILURE), _any_of(_ONLY_MENTIONED)


def is_no_shortage(text: str) -> bool:
    """True if the line only looks like a shortage: documentation, code, a count of none, a pod without a node, the
    memory on a chip."""
    if "`" in text and _QUOTED.search(text) and _MENTIONED.search(text):
        return True
    return any(pattern.search(text) for pattern in _NO_SHORTAGES)


def is_advice(before: str) -> bool:
    """True if a sentence that begins with the words `before` tells how to avoid a shortage."""
    return _ADVICE.search(before) is not None


def names_a_device(text: str) -> bool:
    """True if a report of a shortage is of a GPU's memory; torch's class of errors is."""
    if names_the_host(text) and not _OF_THE_GPU.search(text):
        return False
    return _OF_A_DEVICE.search(text) is not None


def names_the_host(text: str) -> bool:
    """True if a report of a shortage is of the host's memory."""
    return _OF_THE_HOST.search(text) is not None


def is_unfamiliar_failure(text: str, across: int | None = None) -> bool:
    """True if the line reports that memory ran out, with words on both sides of the position `across`, if any.

    Advice ("to avoid out-of-memory errors, …") and shortages that the program handled ("retrying") do not count.
    """
    of_a_device = _shortage_of_a_device(text)
    ran_out = of_a_device or _RAN_OUT.search(text) or _shortage(text)
    if ran_out and across is not None and not ran_out.start() < across < ran_out.end():
        return False
    if ran_out is None or _MENTIONED.search(text):
        return False
    return of_a_device is not None or _FAILURE.search(text) is not None


# Shortages by family: a noun for memory beside a word of exhaustion, or what was wanted beside less that was there.
#
# Programs word them in any way (`GPU heap full`, `no more VRAM`, `device arena exhausted: wanted 12 GiB, have 3 GiB`).

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


def _either(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_DEVICE_HAS_NONE_LEFT = _either(
    rf"{_DEVICE_MEMORY}{_IS} {_GONE}",
    rf"\b{_NONE_LEFT} (?:\w+ ){{0,2}}?{_DEVICE_MEMORY}\b{_NO_FAILURE_OF}",
    rf"\bno {_DEVICE_MEMORY} (?:is |was )?(?:left|available|remaining|free)\b",
    rf"\b{_DEVICE} ?\d{{0,3}} has no (?:more |free )?memory\b",
)
_OF_ANY = _either(
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
_OTHER_MEMORY = _either(
    r"\b(?:replay|experience|episodic|rollout|chat|conversation|agent|shared|long[- ]term) (?:memory|buffer)\b",
    r"\bfull gc\b|\b(?:cpu|gpu)s? (?:are |is )?available",
)


def _shortage_of_a_device(text: str) -> re.Match[str] | None:
    """The words that report that a device has no memory left, which are a report without any word of a failure."""
    found = _DEVICE_HAS_NONE_LEFT.search(text)
    return None if found is None or _OTHER_MEMORY.search(text) else found


def _shortage(text: str) -> re.Match[str] | None:
    """The words for a shortage of any memory; they report one only beside a word of a failure."""
    found = _OF_ANY.search(text) or _less_than_wanted(text)
    return None if found is None or _OTHER_MEMORY.search(text) else found


def _less_than_wanted(text: str) -> re.Match[str] | None:
    for pattern in _WANTED_AND_HAD:
        found = pattern.search(text)
        if found and (size_bytes(found["wanted"]) or 1) > (size_bytes(found["had"]) or 0):
            return found
    return None
