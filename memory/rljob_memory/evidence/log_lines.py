"""A log's lines as text: bounded in length, free of colours, and told apart by the process that wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

LONGEST_LINE_BYTES = 1 << 16
"""A longer one is read in pieces, so that a file without line ends takes no more memory."""

MOST_MESSAGE_LINES = 12
"""A terminal of 80 columns breaks torch's message into nine."""

_TELLING = re.compile(
    rb"emory|File |lloc|OOM|oom|shm|us error|SIG|illed|xit|because it is full|EngineCore|LLMRayActor|vLLM|vllm"
    rb"|UBLAS|CUDNN|No space|CUDA|Cuda|HIP|MiB|MA |Watchdog|ActorDied|roken|peer|ChildFailed|/torch_|Traceback"
    rb"|to wake up|PyTorch"
)
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\^\[\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_PREFIX = re.compile(
    r"^\s*(?:\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)?\]?\s*[-|]?\s*|"
    r"\((?P<name>[\w.:-]{1,80}(?: rank=\d+)?)(?: \w+)?(?: pid=(?P<pid>\d+))?(?:, ip=(?P<ip>[\d.]+))?\)\s?|"
    r"\[(?:rank|default)(?P<rank>\d+)\]:\s?|"
    r"(?:ERROR|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[[\w./]+:\d+\] ?|"
    r"[\w-]{1,60}\s+\| )"
)
_ISO_TIME = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_SHORT_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_RANK = re.compile(r"\brank[=\[ ](\d{1,6})\b|\[(?:rank|default)(\d{1,6})\]")


@dataclass(frozen=True, slots=True)
class LogLine:
    """`text`: without colours and prefixes. `writer`: tells interleaved processes apart; "" where nothing does.
    `clock`: the first time stamp's format, and seconds in it. `rank`: as the prefix says."""

    text: str
    writer: str
    clock: tuple[str, float] | None
    rank: int | None


def telling_lines(stream: BinaryIO) -> Iterator[LogLine]:
    """The lines that can matter here, and those after them that may belong to them: the code of a traceback's frame,
    the rest of a message that was broken."""
    following = 0
    while raw := stream.readline(LONGEST_LINE_BYTES):
        if b"out of memory" in raw:
            following = MOST_MESSAGE_LINES
        elif b"File " in raw:
            following = max(following, 2)
        elif following == 0 and not _TELLING.search(raw):
            continue
        following = max(following - 1, 0)
        yield parse_line(raw)


def parse_line(raw: bytes) -> LogLine:
    """Never fails: what is no UTF-8 is replaced."""
    text = _CONTROL.sub(" ", _COLOUR.sub("", raw.decode("utf-8", "replace").rstrip("\r\n")))
    head = text[:400]
    clock = _clock(head)
    rank = next((int(found) for match in _RANK.finditer(head) for found in match.groups() if found), None)
    writer: list[str] = []
    while (match := _PREFIX.match(text)) and match.end():
        writer.extend(found for found in (match["name"], match["pid"], match["ip"], match["rank"]) if found)
        text = text[match.end() :]
    return LogLine(text, " ".join(writer), clock, rank)


def _clock(text: str) -> tuple[str, float] | None:
    iso, short = _ISO_TIME.search(text), _SHORT_TIME.search(text)
    if iso and (not short or iso.start() <= short.start()):
        year, month, day, hour, minute, second = (int(part) for part in iso.groups()[:6])
        fraction = float(f"0.{iso[7]}") if iso[7] else 0.0
        return "date", _seconds(year * 372 + month * 31 + day, hour, minute, second) + fraction
    if short:
        month, day, hour, minute, second = (int(part) for part in short.groups())
        return "day", _seconds(month * 31 + day, hour, minute, second)
    return None


def _seconds(day: int, hour: int, minute: int, second: int) -> float:
    """Not a time, only something that orders like one."""
    return float(((day * 24 + hour) * 60 + minute) * 60 + second)
