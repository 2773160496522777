"""Sentences that report a shortage of memory: titles and posts around a log whose own message is missing.

They count only in a text without any message of a program. Advice, questions and general statements do not count.
"""

from __future__ import annotations

import re


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


_DEVICES = r"(?:cuda|gpu|npu|xpu|tpu|hip|rocm|vram|hbm|cpu|ram|ray|host|system|driver|device)"
_SHORTAGE = _any_of(
    r"(?<![A-Za-z0-9_./-])OOM(?:s|ed|ing|'?ed)?(?![A-Za-z0-9_=-]|\.\w)",
    rf"\b{_DEVICES}[ -]oom\b",
    r"\bout[ -]of[ -](?!range|bounds?|order|place)(?:\w+ ){0,2}memory\b",
    r"\bout of (?:cuda|vram|ram)\b",
    r"\b(?:not? enough|insufficient) (?:\w+ ){0,2}memory\b(?! (?:bandwidth|alignment|access|banks?))",
    r"\b(?:an?|the|this|with) memory errors?\b",
    rf"\b{_DEVICES} (?:memory|ram) (?:errors?|overflow\w*|explo\w+|exhaust\w+|shortage|blow\w*)\b",
    r"\b(?:memory|ram|vram) (?:(?:is|was|gets?|got|completely|totally) ){0,2}(?:full|exhausted|exceeded|used up)\b",
    r"\b(?:exceed\w*|exhaust\w*) (?:the |all |my )?(?:available |total )?(?:\w+ )?(?:memory|v?ram)\b",
)
_IN_OTHER_LANGUAGES = _any_of(
    # Chinese
    r"[显内]存(?:严重)?(?:不足|不够|溢出|爆|耗尽|超[限出])",
    r"爆[显内]?存|[显内]存被?(?:用|占)[满完]",
    # Korean, Japanese
    r"메모리\S{0,2} (?:가 )?(?:부족|초과)",
    r"メモリ(?:ー)?(?:が)?(?:不足|足り)",
    # Russian, French, Spanish, German
    r"(?:не хватает|недостаточно|нехватка) (?:\w+ )?памяти",
    r"mémoire insuffisante",
    r"memoria (?:insuficiente|agotada)",
    r"speicher reicht nicht|nicht genügend \w*speicher",
)
_GROWTH = _any_of(
    r"\b(?:gpu|cuda|vram|device) memory leak\w*|\bleak\w* (?:of )?(?:gpu|cuda|vram|device) memory\b",
    r"\b(?:memory|vram)(?: usage| use| consumption)? (?:slowly |steadily |gradually |constantly |just |always ){0,2}"
    r"(?:creeps?|accumulates?|climbs?|(?:keeps?|slowly|steadily|gradually|constantly) (?:grow|increas|ris|climb)\w*)\b",
    r"\b(?:accumulat\w+|increas\w+|grow\w*) (?:gpu |cuda )?(?:memory|vram)\b.{0,40}\b(?:each|every|per)\b"
    r" (?:\w+ )?(?:step|batch|iteration|epoch|run|call|loop)",
)
_FOREIGN = re.compile(r"[^\x00-\u024f]")
"""Letters beyond Latin: their languages report without the verbs below, also of an `OOM`."""
_REPORT = _any_of(
    r"\b(?:errors?|exceptions?|issues?|problems?|bugs?|crash\w*|fail\w*|killed|hits?|g[eo]t\w*|have|having|had|occur\w*)\b",
    r"\b(?:happen\w*|encounter\w*|r[au]n(?:s|ning)? (?:out|into)|throws?|rais\w+|caus\w+|leads?|goes|went|reports?)\b",
    r"\b(?:always|still|again|seeing|saw|suddenly|after|during|while|when|with|at|on|in)\b",
)
_NO_REPORT = _any_of(
    # advice, and what the program handled
    r"\b(?:avoid|prevent|mitigat|reduc|risk|potential|handl|catch|retr(?:y|ie)|skip|recover)\w*",
    r"\b(?:likely|possibl[ey]|if|unless|whether|may|might|could|would|should|in case|without|helps?|caught|fallback)\b",
    r"\bcan (?:\w+ly |also |still )?(?:cause|lead|result|trigger|happen|occur|be)\b",
    r"\b(?:falling back|usually|typically|often|sometimes|please|e\.g|tips?|hint|troubleshooting)\b",
    # a guide, which lists problems with their solutions
    r"^#{2,6} |^\W{0,4}problem\W",
    # counts and switches, columns of a table
    r"\bOOMs?\b[^:=]{0,20}[:=] {0,4}(?:0|no|none|off|false)\b|(?:^|,)oom(?:,|$)",
    r"\b(?:no|not|never) (?:more )?(?:\w+ )?(?:OOM|out of)",
    r"\b(?:fix\w*|add\w*|support\w*|solve\w*|address\w*|closes?) (?:\S+ ){0,3}(?:OOM|out[ -]of[ -])",
    r"防止|避免|如果|可能|是否|建议|通常|避け|防ぐ|방지|чтобы избежать",
    # the memory of an agent
    r"\b(?:replay|experience|episodic|conversation|chat) (?:memory|buffer)\b",
    # questions
    r"\b(?:is (?:it|this|that|there)|can (?:we|i|you)|do(?:es)? (?:it|this|we))\b[^?]*\?",
    # counts beside other crashes, a warning after which torch's allocator continues, requests that are postponed
    r"due to memory pressure \(OOM\), [1-9]|memory mapping failed",
    r"\bretract|Decode out of memory happened|\bpreempted\b",
    # names of settings and of parts of systems
    r"\bOOM[- ](?:protect|guard|watch|detect|monitor|score|polic|threshold)\w*",
    r"\bOOM[- ](?:debug|hook|observ|adjust|safe|prone|test)\w*",
    r"\bwatch\w* (?:for )?OOM\b",
)
_CODE = re.compile(
    r"^\s*(?:[+-](?![ -])|//|\*|def |class |import |from |if |for |assert |export |--)|[=!]= ?[\"']|\w\(.*\):?$"
)
_SENTENCES = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])")
_LONGEST_WORDS = 6
"""A sentence of no more words, such as a title, is a report without a verb."""
_LONGEST_TEXT = 2_000


def reported_shortage(text: str) -> str | None:
    """The sentence of `text` that reports that memory ran out; None if there is none."""
    text = text[:_LONGEST_TEXT]
    if not _names_a_shortage(text) or _CODE.search(text):
        return None
    return next((part.strip() for part in _SENTENCES.split(text) if _is_report(part)), None)


def reported_growth(text: str) -> str | None:
    """The sentence of `text` that reports a growth of GPU memory from step to step; None if there is none."""
    text = text[:_LONGEST_TEXT]
    if not ("emory" in text or "VRAM" in text or "vram" in text) or not _GROWTH.search(text):
        return None
    found = (part.strip() for part in _SENTENCES.split(text))
    return next((part for part in found if _GROWTH.search(part) and not _NO_REPORT.search(part)), None)


def _names_a_shortage(text: str) -> bool:
    return _SHORTAGE.search(text) is not None or _IN_OTHER_LANGUAGES.search(text) is not None


def _is_report(sentence: str) -> bool:
    if not _names_a_shortage(sentence) or _NO_REPORT.search(sentence):
        return False
    if _FOREIGN.search(sentence) or _IN_OTHER_LANGUAGES.search(sentence) or len(sentence.split()) <= _LONGEST_WORDS:
        return "?" not in sentence
    return _REPORT.search(sentence) is not None
