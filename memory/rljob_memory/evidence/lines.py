"""The lines of a log as text: from any bytes, of bounded length, without colors and prefixes, with writer and time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from html import unescape
from typing import BinaryIO

from rljob_memory.evidence.signatures import pattern

_CHUNK_BYTES = 1 << 18
_LONGEST_LINE_BYTES = 1 << 15
"""A longer one is read in parts, so that a file without line ends takes no more memory."""
_OVERLAP_BYTES = 1 << 10
"""Overlap of two parts, so that no message is lost between them."""
_LONG_LINE_BYTES = 1 << 12
_LONGEST_EXCERPT_BYTES = 3_000
_MOST_EXCERPTS = 8
_IN_LONG_LINES = (
    *(b"out of memory", b"outofmemory", b"exceed allowed memory", b"tried to allocate", b"oom", b"memory error"),
    *(b"memory limit", b"memory usage", b"memory is", b"_alloc", b"alloc_", b"killed", b"no space left"),
    *(b"traceback", b"exhausted", b"not enough memory", b"insufficient"),
)
"""Words around which the parts of a long line are read."""
_MOST_PARTS, _MOST_ESCAPED_PARTS = 64, 512
_IN_ENDLESS_LINES = (b"tried to allocate", b"outofmemory", b"oom-kill")
"""After so many parts of one line, or of one whose line ends are escaped, only these words count."""
_DIGITS = b"0123456789"
_DIGIT = re.compile(rb"\d")
_MOST_SHAPES = 1 << 16
_TEXT_KEYS = (
    "log",
    "message",
    "msg",
    "text",
    "event",
    "line",
    "textPayload",
    "exc_info",
    "exception",
    "error",
    "stack",
)
_SHORTEST_MESSAGE = 40
"""A shorter text next to figures names them: an event of a structured log, whose fields are the content."""
_ESCAPED_END = re.compile(rb"\\+r?\\*n(?![a-z]\w*[\\/])")
"""A line end inside of a quoted text, such as a message in JSON; not in a Windows path."""
_PRINTABLE = re.compile(r"[^\ufffd\x00-\x1f\x7f-\x9f]{24,}")
_DAMAGED_SHARE = 0.1
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_PREFIX = re.compile(
    r"\s*(?:\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]?(?:[-|][ \t]?)?"
    # the logs of the kernel, systemd, containerd, GitHub, Python's loggers; lists, quotations, pytest's marks
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,60} [\w./-]{1,60}(?:\[\d+\])?: ?"
    r"|std(?:err|out) [FP] |##\[\w{1,10}\]"
    r"|(?:CRITICAL|ERROR|WARNING|INFO|DEBUG)(?::[\w.]{1,60}:| {0,4}[-|] ?(?:[\w.]{1,60}:[\w<>]{1,40}:\d{1,5} - )?)"
    r"|(?P<level>ERROR|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]+:\d+\] ?|\[[A-Z][A-Za-z]{2,8}\]\s"
    r"|[-*] (?=\S| {2})|[\w-]{1,60}\s+\| |\| (?=\d{4}-\d\d-\d\dT)|> ?|E(?= {3})"
    r"|\((?!OOM\))(?P<name>[\w.:-]{1,80}(?: rank=\d+)?)(?: \w+)?(?: pid=(?P<pid>\d+))?(?:, ip=(?P<ip>[\d.]+))?\)\s?"
    r"|\[(?:rank|default)(?P<rank>\d+)\]:\s?|\[(?P<pod>pod/[\w./-]{1,200})\] )"
)
_RANK = re.compile(r"\brank[=\[ ](\d{1,6})\b|\[(?:rank|default)(\d{1,6})\]")
_ISO_TIME = re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:\d\d)?")
_SHORT_TIME = re.compile(r"\b\d\d-\d\d \d\d:\d\d:\d\d\b")
_LEAP_YEAR = 2000
"""Stands for the year of a time without one, so that each of its days exists."""
_HEAD_CHARACTERS = 400
_TIME_MARK = re.compile(r"^rljob (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line and its writer."""

    text: str
    """The text without colors and prefixes."""

    writer: str = ""
    """Distinguishes interleaved processes; empty if the line names no process."""

    clock: tuple[str, float] | None = None
    """Format of the first time stamp, and its seconds: since the epoch if it names its zone."""

    rank: int | None = None
    """Rank in the prefix."""

    is_engines_error: bool = False
    """It has the head of an error in vLLM's log, and not of one of its diffusion models, which have no KV cache."""

    is_routine: bool = False
    """Its program has logged it as information."""

    lower: str = field(init=False, default="")
    """The text in lower case."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lower", self.text.lower())


class WordGroups:
    """Finds the lines that have one of many words. Logs repeat their lines with other numbers, so the answer is kept by
    the line without its digits."""

    def __init__(self, *groups: Iterable[str]) -> None:
        """`groups`: words in lower case."""
        numbered = [(word.encode(), place) for place, group in enumerate(groups) for word in group]
        self._plain = _without_longer((word, place) for word, place in numbered if not _DIGIT.search(word))
        self._with_digits = [(word, place) for word, place in numbered if _DIGIT.search(word)]
        self._known: dict[int, int | None] = {}

    def of(self, lines: Sequence[bytes]) -> list[int | None]:
        """The first group of which each line has a word, by its number; None if it has none."""
        if not lines:
            return []
        text = b"\n".join(lines).lower()
        shapes = text.translate(None, _DIGITS).split(b"\n")
        keys = list(map(hash, shapes))
        known = self._known
        if new := {key: shape for key, shape in zip(keys, shapes, strict=True) if key not in known}:
            if len(known) > _MOST_SHAPES:
                known.clear()
                new = dict(zip(keys, shapes, strict=True))
            together = b"\n".join(new.values())
            present = [(word, place) for word, place in self._plain if word in together]
            for key, shape in new.items():
                known[key] = _first_group(present, shape)
        found = [known[key] for key in keys]
        if present := [(word, place) for word, place in self._with_digits if word in text]:
            for number, line in enumerate(text.split(b"\n")):
                places = (found[number], _first_group(present, line))
                found[number] = min((place for place in places if place is not None), default=None)
        return found


def _first_group(words: Iterable[tuple[bytes, int]], text: bytes) -> int | None:
    found = None
    for word, place in words:  # a generator takes twice as long, and this is where the time goes
        if word in text and (found is None or place < found):
            found = place
            if not place:
                break
    return found


def _without_longer(words: Iterable[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    """The words that contain no other one of their group or of one before it, in the order of the groups."""
    needed: list[tuple[bytes, int]] = []
    for word, place in sorted(set(words), key=lambda pair: (pair[1], len(pair[0]))):
        if not any(part in word for part, _ in needed):
            needed.append((word, place))
    return needed


def raw_lines(stream: BinaryIO, groups: WordGroups) -> Iterator[tuple[bytes, int | None]]:
    """The lines in UTF-8 without their ends, each with its group. One of more than 32 KiB comes in parts."""
    rest, decoder, parts = b"", None, 0
    chunk = stream.read(_CHUNK_BYTES)
    if encoding := _utf_16(chunk):
        decoder = codecs.getincrementaldecoder(encoding)("replace")
    while True:
        text = rest + (decoder.decode(chunk, not chunk).encode("utf-8", "replace") if decoder else chunk)
        lines = text.splitlines()
        rest, parts = b"", 0 if len(lines) > 1 else parts
        if chunk and lines and not text.endswith(b"\n"):
            rest = lines.pop() + (b"\r" if text.endswith(b"\r") else b"")
        while len(rest) > _LONGEST_LINE_BYTES:
            part, parts = rest[:_LONGEST_LINE_BYTES], parts + 1
            most = _MOST_ESCAPED_PARTS if b"\\n" in part else _MOST_PARTS
            lines.extend([part] if parts <= most else _excerpts(part, _IN_ENDLESS_LINES))
            rest = rest[_LONGEST_LINE_BYTES - _OVERLAP_BYTES :]
        yield from zip(lines, groups.of(lines), strict=True)
        if not chunk:
            return
        chunk = stream.read(_CHUNK_BYTES)


@lru_cache(1024)
def parse_line(raw: bytes) -> LogLine:
    """Parse a line of any bytes. Of binary data, only runs of printable characters are kept."""
    text = raw.decode("utf-8", "replace")
    if text.count("\ufffd") > _DAMAGED_SHARE * len(text):
        text = " ".join(_PRINTABLE.findall(text))
    if "m" in text and ("[" in text or "\\" in text):
        text = pattern("color").sub("", text)
    if not text.isprintable():
        text = _CONTROL.sub(" ", text)
    if "&" in text or "</" in text or "<br" in text:
        text = unescape(pattern("tag").sub("", text))
    head = text[:_HEAD_CHARACTERS]
    ranks = _RANK.findall(head) if "rank" in head or "[default" in head else []
    rank = int(ranks[0][0] or ranks[0][1]) if ranks else None
    writer: list[str] = []
    is_engines_error = False
    if text[-1:] in ("*", "`") and (marked := pattern("marked").match(text)):
        text = marked[2]
    while (match := _PREFIX.match(text)) and match.end():
        writer.extend(found for found in match.group("pod", "name", "pid", "ip", "rank") if found)
        is_engines_error |= match["level"] == "ERROR" and "diffusion" not in match[0]
        text = text[match.end() :]
    is_routine = pattern("routine").search(head) is not None and not pattern("serious").search(head)
    return LogLine(text, " ".join(writer), _clock(head), rank, is_engines_error, is_routine)


def time_mark(time: datetime, event: str) -> str:
    """A line that dates the lines after it: libraries print without a time. `time` may be in any zone."""
    return f"rljob {time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z {event}"


def marked_time(text: str) -> float | None:
    """The time in a time mark, in seconds since the epoch; None for other lines."""
    match = _TIME_MARK.match(text)
    try:
        return datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp() if match else None
    except ValueError:
        return None


def _utf_16(start: bytes) -> str | None:
    """The byte order of UTF-16 text, by its mark or by the zeros of its Latin letters; None for other texts."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = start[0::2].count(0), start[1::2].count(0)
    if max(even, odd) <= len(start) // 6 or min(even, odd) > len(start) // 50:
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def pieces(line: bytes) -> list[bytes]:
    """The lines inside of a line of JSON, or of text whose line ends are escaped. Of long ones, the parts around
    words about memory."""
    inner = [line]
    if line[:1] == b"{" and (text := _out_of_json(line)) is not None:
        inner = [part.encode("utf-8", "backslashreplace") for part in text.splitlines()]
    elif b"\\n" in line and line.count(b"\\n") > 1:
        inner = [part.replace(b'\\"', b'"').replace(b"\\t", b"\t") for part in _ESCAPED_END.split(line)]
    if max(map(len, inner), default=0) <= _LONG_LINE_BYTES:
        return inner
    return [excerpt for part in inner for excerpt in _excerpts(part)]


def _out_of_json(line: bytes) -> str | None:
    """The text of a line that a logger has wrapped in JSON; None for other lines, and for JSON that holds figures."""
    try:
        found = json.loads(line) if line.endswith(b"}") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    texts = [found[key] for key in _TEXT_KEYS if isinstance(found.get(key), str)]
    figures = sum(isinstance(value, int | float) for value in found.values())
    if not texts or (figures > 1 and sum(map(len, texts)) < _SHORTEST_MESSAGE):
        return None
    head = [
        str(found[key]) for key in ("time", "timestamp", "ts", "level", "severity") if isinstance(found.get(key), str)
    ]
    return " ".join([*head[:-1], *(word.upper() for word in head[-1:]), "\n".join(texts)])


def _excerpts(line: bytes, words: Sequence[bytes] = _IN_LONG_LINES) -> Iterator[bytes]:
    if len(line) <= _LONG_LINE_BYTES:
        yield line
        return
    lower, end = line.lower(), 0
    places = {word: place for word in words if (place := lower.find(word)) >= 0}
    for _ in range(_MOST_EXCERPTS):
        if not places:
            return
        start = max(min(places.values()) - _LONGEST_EXCERPT_BYTES // 4, end)
        end = start + _LONGEST_EXCERPT_BYTES
        yield line[start:end]
        later = {word: place if place >= end else lower.find(word, end) for word, place in places.items()}
        places = {word: place for word, place in later.items() if place >= 0}


def _clock(text: str) -> tuple[str, float] | None:
    iso, short = _ISO_TIME.search(text), _SHORT_TIME.search(text)
    try:
        if iso and (not short or iso.start() <= short.start()):
            time = datetime.fromisoformat(iso[0])
            return ("epoch", time.timestamp()) if time.tzinfo else ("date", time.replace(tzinfo=UTC).timestamp())
        if short:
            return "day", datetime.fromisoformat(f"{_LEAP_YEAR}-{short[0]}").replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):  # no date has these numbers
        return None
    return None
