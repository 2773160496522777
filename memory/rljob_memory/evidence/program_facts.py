"""The programs that wrote a log, their versions, and the values of their options."""

from __future__ import annotations

import re

from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_lines import LogLine
from rljob_memory.programs import PROGRAMS

_LEAVES = sorted({leaf for program in PROGRAMS.values() for leaf in program.names_in_logs}, key=len, reverse=True)
_VALUE = re.compile(
    rf"(?<![A-Za-z0-9])(?P<name>{'|'.join(map(re.escape, _LEAVES))})['\"]?(?:\s{{0,4}}[:=]\s{{0,4}}|\s)['\"]?"
    r"(?P<value>-?\d[\w.]{0,15}|[Tt]rue|[Ff]alse|None|null|adamw\w{0,20}|paged_\w{1,20})(?![\w.])"
)
"""`gpu_memory_utilization=0.85`, `'gpu_memory_utilization': 0.85`, `--vllm_gpu_memory_utilization 0.85`."""
_VERSION = re.compile(
    rf"\b(?P<name>{'|'.join(map(re.escape, PROGRAMS))})[ =@_-]+v?(?P<version>\d+\.\d+(?:\.\d+)?)\b", re.I
)
_MOST_VALUES = 4
"""Different values of one option that are kept: with more than one, none is called the present value."""


_FULL_NAMES = frozenset(
    option.full_name for program in PROGRAMS.values() for option in program.options if option.full_name != option.leaf
)
_SECTION = re.compile(r"(?:\w{1,40}\.){1,8}$")
_MAY_HAVE_VALUES = (
    "emory_util",
    "batch_size",
    "offload",
    "fraction",
    "max_",
    "sleep",
    "checkpointing",
    "tokens",
    "enable",
    "dynamic",
    "micro",
    "liger",
    "zero_stage",
)
"""Nearly every option has one of these. Looking for words is several times faster than a regular expression."""
_TRAINING_SCRIPT = re.compile(
    r"File \"(?:[^\"]{0,300}/)?(?:\w{1,40}_)?(?:(?:pre)?train|fine_?tune|sft|rlhf|dpo|grpo|ppo)(?:_\w{1,40})?\.py\""
)
"""In a traceback of any process."""
_MARKS = tuple((mark, key) for key, program in PROGRAMS.items() for mark in program.recognize)


_OF_RLJOB = re.compile(
    r"\brljob_(?:trainer|memory|probe)\b|\brljob\.dev/|^rljob(?:-probe)?: |^rljob \d{4}-|^warning: OutOfMemory: "
)
"""Frames, labels, marks and messages of RLJob."""


def note_programs(builder: EvidenceBuilder, line: LogLine) -> None:
    """Record the programs, versions and option values that the line shows."""
    text = line.text
    if ("rljob" in text or "OutOfMemory: " in text) and _OF_RLJOB.search(text):
        builder.is_of_rljob = True
    for mark, key in _MARKS:
        if key not in builder.programs and (mark in text or mark in line.writer):
            builder.programs.append(key)
    if 'File "' in text and _TRAINING_SCRIPT.search(text):
        builder.trains = True
    if "==" in text or " v" in text:
        for match in _VERSION.finditer(text):
            builder.versions.setdefault(match["name"].lower(), match["version"])
    if any(part in text for part in _MAY_HAVE_VALUES):
        for match in _VALUE.finditer(text):
            section = _SECTION.search(text, 0, match.start())
            full_name = f"{section[0]}{match['name']}" if section else ""
            for name in (match["name"], full_name) if full_name in _FULL_NAMES else (match["name"],):
                values = builder.option_values.setdefault(name, [])
                if match["value"] not in values and len(values) < _MOST_VALUES:
                    values.append(match["value"])
