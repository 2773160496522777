"""The lines of a log as text: from any bytes, of bounded length, without colors and prefixes, with writer and time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import unescape
from typing import BinaryIO

_CHUNK_BYTES = 1 << 17
_LONGEST_LINE_BYTES = 1 << 15
"""A longer one is read in pieces, so that a file without line ends takes no more memory."""
_OVERLAP_BYTES = 1 << 10
"""Overlap of two pieces, so that no message is lost between them."""
_LONG_LINE_BYTES = 1 << 12
_LONGEST_EXCERPT_BYTES = 3_000
_MOST_EXCERPTS = 8
_TELLING_IN_LONG_LINES = re.compile(
    rb"out of memory|outofmemory|exceed allowed memory|tried to allocate|oom|memory (?:error|limit|usage|is)"
    rb"|_alloc|alloc_|killed|no space left|traceback|exhausted|not enough memory|insufficient",
    re.IGNORECASE,
)
_END = re.compile(rb"\r\n|\n|\r")
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
_TAG = re.compile(r"</?(?:span|br|p|div|pre|code|td|tr|li|ul|b|strong|a|samp)\b[^>]{0,300}>")
_ESCAPED_END = re.compile(rb"\\+r?\\*n(?![a-z]\w*[\\/])")
"""A line end inside of a quoted text, such as a message in JSON; not in a Windows path."""
_PRINTABLE = re.compile(r"[^\ufffd\x00-\x1f\x7f-\x9f]{24,}")
_DAMAGED_SHARE = 0.1
_COLOR = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\^\[\[[0-9;]*m|\\(?:x1b|033|u001b)\[[0-9;]*m|\u241b\[[0-9;]*m|\[\d{1,3}(?:;\d{1,3}){0,5}m"
)
"""Escape codes, also those that a page shows as text or without the escape."""
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
_MARKED = re.compile(r"^ {0,3}(\*\*|`{1,3})(.*)\1\s*$")
"""A whole line in bold type or as code, in Markdown."""
_RANK = re.compile(r"\brank[=\[ ](\d{1,6})\b|\[(?:rank|default)(\d{1,6})\]")
_ISO_TIME = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_SHORT_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_HEAD_CHARACTERS = 400
_ROUTINE = re.compile(r"\b(?:INFO|DEBUG)\b|\b(?:level|severity)[\"']?\s?[:=]\s?[\"']?(?:info|debug)\b")
_SERIOUS = re.compile(r"\b(?:WARN(?:ING)?|ERROR|CRITICAL|FATAL|EXCEPTION)\b")
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

    number: int = 0
    """Number of the line in its file."""

    is_engines_error: bool = False
    """It has the head of an error in vLLM's log, and not of one of its diffusion models, which have no KV cache."""

    is_routine: bool = False
    """Its program has logged it as information."""

    raw_above: tuple[bytes, ...] = ()
    """The lines above it, the nearest last."""

    lower: str = field(init=False, default="")
    """The text in lower case."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lower", self.text.lower())

    @property
    def above(self) -> list[str]:
        """The lines above it without colors and prefixes, the nearest last."""
        return [parse_line(raw).text for raw in self.raw_above]


def raw_lines(stream: BinaryIO, *groups: Sequence[bytes]) -> Iterator[tuple[bytes, int | None]]:
    """The lines in UTF-8 without their ends, each with the first of the `groups` of which it has a word, by its number;
    None if it has none. The words are in lower case.

    Of a long line, the parts around words about memory.
    """
    rest, decoder = b"", None
    chunk = stream.read(_CHUNK_BYTES)
    if encoding := _utf_16(chunk):
        decoder = codecs.getincrementaldecoder(encoding)("replace")
    while True:
        text = decoder.decode(chunk, not chunk).encode("utf-8", "replace") if decoder else chunk
        *lines, rest = _END.split(rest + text)
        while len(rest) > _LONGEST_LINE_BYTES:
            lines.append(rest[:_LONGEST_LINE_BYTES])
            rest = rest[_LONGEST_LINE_BYTES - _OVERLAP_BYTES :]
        if not chunk:
            lines.append(rest)
        together = b"\n".join(lines).lower()
        # Most words are in no line of a chunk.
        present = [(word, number) for number, group in enumerate(groups) for word in group if word in together]
        for line in lines:
            for piece in _pieces(line):
                lower = piece.lower()
                found = None
                for word, number in present:  # a generator takes twice as long, and this is where the time goes
                    if word in lower:
                        found = number
                        break
                yield piece, found
        if not chunk:
            return
        chunk = stream.read(_CHUNK_BYTES)


def parse_line(raw: bytes, number: int = 0, above: Iterable[bytes] = ()) -> LogLine:
    """Parse a line of any bytes. Of binary data, only runs of printable characters are kept."""
    text = raw.decode("utf-8", "replace")
    if text.count("\ufffd") > _DAMAGED_SHARE * len(text):
        text = " ".join(_PRINTABLE.findall(text))
    if "m" in text and ("[" in text or "\\" in text):
        text = _COLOR.sub("", text)
    if not text.isprintable():
        text = _CONTROL.sub(" ", text)
    if "&" in text or "</" in text or "<br" in text:
        text = unescape(_TAG.sub("", text))
    head = text[:_HEAD_CHARACTERS]
    ranks = _RANK.findall(head) if "rank" in head or "[default" in head else []
    rank = int(ranks[0][0] or ranks[0][1]) if ranks else None
    writer: list[str] = []
    is_engines_error = False
    if text[-1:] in ("*", "`") and (marked := _MARKED.match(text)):
        text = marked[2]
    while (match := _PREFIX.match(text)) and match.end():
        writer.extend(found for found in match.group("pod", "name", "pid", "ip", "rank") if found)
        is_engines_error |= match["level"] == "ERROR" and "diffusion" not in match[0]
        text = text[match.end() :]
    is_routine = _ROUTINE.search(head) is not None and not _SERIOUS.search(head)
    return LogLine(text, " ".join(writer), _clock(head), rank, number, is_engines_error, is_routine, tuple(above))


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


def _pieces(line: bytes) -> Iterator[bytes]:
    """The lines inside of a line of JSON, or of text whose line ends are escaped."""
    if line[:1] == b"{" and (text := _out_of_json(line)) is not None:
        for unescaped in text.splitlines():
            yield from _excerpts(unescaped.encode("utf-8", "backslashreplace"))
    elif b"\\n" in line and line.count(b"\\n") > 1:
        for part in _ESCAPED_END.split(line):
            yield from _excerpts(part.replace(b'\\"', b'"').replace(b"\\t", b"\t"))
    else:
        yield from _excerpts(line)


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


def _excerpts(line: bytes) -> Iterator[bytes]:
    if len(line) <= _LONG_LINE_BYTES:
        yield line
        return
    end = count = 0
    for match in _TELLING_IN_LONG_LINES.finditer(line):
        if match.start() >= end and count < _MOST_EXCERPTS:
            start = max(match.start() - _LONGEST_EXCERPT_BYTES // 4, end)
            end, count = start + _LONGEST_EXCERPT_BYTES, count + 1
            yield line[start:end]


def _clock(text: str) -> tuple[str, float] | None:
    iso, short = _ISO_TIME.search(text), _SHORT_TIME.search(text)
    if iso and (not short or iso.start() <= short.start()):
        year, month, day, hour, minute, second = (int(part) for part in iso.groups()[:6])
        fraction = float(f"0.{iso[7]}") if iso[7] else 0.0
        if iso[8] and (epoch := _epoch(iso)) is not None:
            return "epoch", epoch + fraction
        return "date", _seconds(year * 372 + month * 31 + day, hour, minute, second) + fraction
    if short:
        month, day, hour, minute, second = (int(part) for part in short.groups())
        return "day", _seconds(month * 31 + day, hour, minute, second)
    return None


def _epoch(iso: re.Match[str]) -> float | None:
    """Seconds since the epoch of a time that names its zone, without its fraction."""
    date, time = "-".join(iso.group(1, 2, 3)), ":".join(iso.group(4, 5, 6))
    try:
        return datetime.fromisoformat(f"{date}T{time}{iso[8]}").timestamp()
    except (ValueError, OverflowError):
        return None


def _seconds(day: int, hour: int, minute: int, second: int) -> float:
    """A number that orders like the time; it is not one."""
    return float(((day * 24 + hour) * 60 + minute) * 60 + second)
