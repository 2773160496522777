"""Recognizes a report that memory ran out, in the words of any program or person, so that no log gets an empty answer.

A report has a noun for memory next to a word of exhaustion (`GPU heap full`, `no more VRAM`), or less than was wanted
(`wanted 12 GiB, have 3 GiB`). Advice, questions, code and shortages that the program handled are no reports.
"""

from __future__ import annotations

import re

from rljob_memory.sizes import size_bytes


def _either(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_DEVICE = r"(?:gpu|cuda|device|video|graphics|accelerator|npu|xpu|tpu|hip|rocm)"
_NUMBER_OF_DEVICE = r"(?:'s)?[ _:-]?\d{0,3}[ _-]"
_MEMORY = (
    rf"(?:\b(?:{_DEVICE}{_NUMBER_OF_DEVICE})?(?:memory|mem)(?: pool| arena| heap| budget)?|\bv?ram|\bhbm"
    rf"|\b(?:{_DEVICE}{_NUMBER_OF_DEVICE})?(?:heap|arena|allocator))\b"
)
_IS = r"(?: (?:is|was|are|has been|became|got|gets?|now|completely|totally|on \w+ ?:?\d*)){0,3}"
_GONE = (
    r"(?:full\b(?![- ]?(?:size|gc\b|precision|of\b|graph|fine))|exhaust\w*|depleted|used up|ran out\b|overflow\w*"
    r"|exceeded|maxed out)"
)
_NONE_LEFT = (
    r"(?:no (?:more|free|remaining|spare)|out[ _-]of(?![ _-](?:range|bounds?|order|place))|not? enough|insufficient"
    r"|too little|lack of|exhausted|exceed\w*|low on)"
)
_NO_FAILURE_OF = r"(?! (?:leak|fragment|profil|usage|growth|pressure|bandwidth|alignment|access|disk|banks?))"
_SIZE = r"\d[\d.,]{0,11} ?(?:[KMGT]i?B|bytes|[KMGT]\b)"
_CANNOT = r"(?:cannot|can't|can not|could not|unable to|fail\w* to)"
_OBTAIN = r"(?:be )?(?:reserve|map|commit|obtain|get|acquire|grow|expand|extend|alloc\w*|fit|place|hold|satisfy)"
_SHORTAGE = _either(
    rf"\b{_NONE_LEFT}[ _-](?:\w+[: _-]{{1,2}}){{0,2}}?{_MEMORY}{_NO_FAILURE_OF}",
    rf"{_MEMORY}{_IS} {_GONE}",
    r"\bOutOf\w{0,20}Memory|\bout of (?:cuda|v?ram)\b",
    r"(?<![A-Za-z0-9_./-])OOM(?:s|ed|ing|'?ed)?(?![A-Za-z0-9_=-]|\.\w)",
    r"\b(?:cuda|gpu|hip|npu|tpu|device|host|ram|ray)[ -]oom\b",
    rf"\bno {_MEMORY} (?:is |was )?(?:left|available|remaining|free)\b",
    rf"\b{_DEVICE} ?\d{{0,3}} has no (?:more |free )?memory\b",
    rf"\b{_CANNOT} (?:\w+ ){{0,2}}{_OBTAIN}\b.{{0,80}}(?:\bmemory\b|\bheap\b|{_SIZE})",
    rf"\b(?:allocat\w+|reserv\w+|m?alloc|mmap) (?:of )?(?:{_SIZE}.{{0,60}})?\bfail",
    r"\bfail\w* to allocate(?: again)?\W*$",
    r"\b(?:malloc|calloc|alloc)\(?\w*\)? failed\b",
    r"\bRESOURCE_EXHAUSTED\b.{0,100}(?:memory|alloc)",
    r"\bmemory limit (?:was |is |has been )?exceeded|\bexceed\w* (?:\w+ ){0,3}memory limit",
    rf"\b(?:{_DEVICE}|cpu|ram|host|system|driver|an?|the|this|with) (?:memory|ram) (?:errors?|explo\w+|shortage)\b",
    r"[显内]存\w{0,4}(?:不足|不够|溢出|爆|耗尽|超[限出]|[用占][满完])|爆[显内]?存",
    r"메모리\S{0,2} (?:가 )?(?:부족|초과)|メモリ(?:ー)?が?(?:不足|足り)|(?:не хватает|недостаточно) (?:\w+ )?памяти",
)
_WANTED_AND_HAD = (
    rf"\b(?:want\w*|need\w*|requir\w*|request\w*|ask\w*)(?: for| of)?\W{{1,3}}(?P<wanted>{_SIZE})"
    rf".{{0,40}}?(?P<had>{_SIZE})"
)
_LESS = re.compile(rf"{_WANTED_AND_HAD}(?: (?:\w+ )?(?:free|available|left|remain))?", re.IGNORECASE)
_HAVE = _either(r"\b(?:have|has|had|got|only|just|free|available|left|remain\w*)\b")

_NO_REPORT = _either(
    # advice, and what the program handled
    r"\b(?:avoid|prevent|mitigat|reduc|risk|potential|handl|catch|retr(?:y|ie)|skip|recover)\w*",
    r"\b(?:likely|possibl[ey]|unless|whether|in case|without|helps?|caught|fallback|tips?:|hint:|troubleshooting)\b",
    r"\b(?:may|might|can|could|would|should)\b(?! not|n?['’]t)|\bif (?!self|not\b)\w|\bfalling back",
    r"\b(?:usually|typically|often|generally|sometimes|please|e\.g)\b",
    r"^#{2,6} |^\W{0,4}problem\W",
    r"\b(?:fix\w*|add\w*|support\w*|solve\w*|address\w*|closes?) (?:\S+ ){0,3}(?:OOM|out[ -]of[ -])",
    r"\b(?:is (?:it|this|that|there)|can (?:we|i|you)|do(?:es)? (?:it|this|we))\b[^?]*\?",
    r"防止|避免|如果|可能|是否|建议|通常|避け|防ぐ|방지|чтобы избежать",
    # counts, names of settings and of parts of systems, the memory of an agent, notices
    r"\bOOMs?\b[^:=]{0,20}[:=] {0,4}(?:0|no|none|off|false)\b|(?:^|,)oom(?:,|$)",
    r"\b(?:no|not|never) (?:more )?(?:\w+ )?(?:OOM|out of)",
    r"\bOOM[- ](?:protect|guard|watch|detect|monitor|score|polic|threshold|debug|hook|observ|adjust|safe|test)\w*",
    r"\b(?:replay|experience|episodic|rollout|chat|conversation|agent|long[- ]term) (?:memory|buffer)\b",
    r"\bfull gc\b",
    r"\(OOM\), [1-9]|\bkiller (?:dis|en)abled|memory mapping failed|\bretract",
    r"Decode out of memory happened|\bpreempted\b",
    r"static TLS",
)
_CODE = re.compile(
    r"^\s*(?:[+-](?![ -])|//|\*(?!\*)|def |class |import |from |if |for |assert |export |--)|[=!]= ?[\"']|\w\(.*\):?$"
)
_REPORT = _either(
    r"error|exception|fail|abort|fatal|critical|kill|panic|crash|evict|terminat",
    r"\b(?:issues?|problems?|bugs?|hits?|g[eo]t\w*|have|having|had|occur\w*|happen\w*|encounter\w*|throws?|rais\w+|caus\w+)\b",
    r"\b(?:r[au]n(?:s|ning)? (?:out|into)|leads?|goes|went|reports?|cannot|can't|could not|unable)\b",
    r"\b(?:always|still|again|seeing|saw|suddenly|after|during|while|when|with|at|on|in)\b",
    rf"{_DEVICE}|vram|hbm|[^\x00-\u024f]|^\W{{0,4}}\w{{0,20}} ?out of ",
)
_SHORTAGE_WORDS = (
    *(
        "out of",
        "out-of",
        "outof",
        "oom",
        "exhaust",
        "insufficient",
        "enough",
        "full",
        "no ",
        "fail",
        "cannot",
        "can't",
    ),
    *(
        "can not",
        "could not",
        "unable",
        "exceed",
        "low on",
        " left",
        "error",
        "ran out",
        "overflow",
        "used up",
        "deplet",
    ),
    *(
        "lack of",
        "too little",
        "maxed",
        "explo",
        "shortage",
        "want",
        "need",
        "requ",
        "存",
        "メモリ",
        "메모리",
        "памяти",
    ),
)
"""Every report has one of these. Looking for them is much faster than the patterns."""
_SHORTAGE_WORDS_IN_BYTES = tuple(word.encode() for word in _SHORTAGE_WORDS)
_SENTENCES = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])")
_FEW_WORDS = 6
"""A sentence of no more words, such as a title, is a report without a verb."""
_LONGEST_TEXT = 2_000

_GPU_WORDS = re.compile(
    r"gpu(?!-(?:\d|\w*(?:node|worker|pod|pool|host)))|cuda|c10::|显存|device|vram|hbm|accelerator|npu|tpu",
    re.IGNORECASE,
)
"""Not in the name of a node or a pod."""
_HOST_WORDS = re.compile(
    r"\b(?:cpu(?![ -]?offload)|host|system|node|main)[ -](?:oom|out of memory|ram|memory|mem)\b|\bRAM\b|内存"
    r"|(?<!/)\b(?:container|pod|cgroup|replica|instance|job|mlock|mmap|process)\b|\bkilled\b",
    re.IGNORECASE,
)


def reported_shortage(text: str) -> str | None:
    """The sentence of `text` that reports that memory ran out; None if there is none."""
    text = text[:_LONGEST_TEXT]
    lower = text.lower()
    if not any(word in lower for word in _SHORTAGE_WORDS):
        return None
    if not _SHORTAGE.search(text) and not _LESS.search(text):
        return None
    if _CODE.search(text):
        return None
    return next((part.strip() for part in _SENTENCES.split(text) if _is_report(part)), None)


def may_report(raw: bytes) -> bool:
    """False if the line has no word that a report of a shortage has."""
    lower = raw.lower()
    return any(word in lower for word in _SHORTAGE_WORDS_IN_BYTES)


def is_advice(text: str) -> bool:
    """True if the words are those of advice, or of a shortage that the program handled."""
    return _NO_REPORT.search(text) is not None


def is_of_the_gpu(text: str) -> bool | None:
    """True if a report of a shortage names the memory of a GPU, False if it names that of the host; else None."""
    host = _HOST_WORDS.search(text) is not None
    if _GPU_WORDS.search(text) and not (host and not re.search(r"gpu|cuda|vram|显存", text, re.IGNORECASE)):
        return True
    return False if host else None


def _is_report(sentence: str) -> bool:
    if not (_SHORTAGE.search(sentence) or _is_less_than_wanted(sentence)) or _NO_REPORT.search(sentence):
        return False
    return "?" not in sentence and (len(sentence.split()) <= _FEW_WORDS or _REPORT.search(sentence) is not None)


def _is_less_than_wanted(text: str) -> bool:
    found = _LESS.search(text)
    if found is None or not _HAVE.search(text):
        return False
    return (size_bytes(found["wanted"]) or 0) > (size_bytes(found["had"]) or 0)
