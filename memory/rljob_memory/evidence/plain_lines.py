"""The lines of a log as its program printed them: out of JSON, HTML and escaped text; broken frames in one piece."""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Iterator
from html import unescape
from typing import BinaryIO, Protocol

LONGEST_LINE_BYTES = 1 << 16
"""A longer one is read in pieces, so that a file without line ends takes no more memory."""

_TEXT_KEYS = (
    *(
        "log",
        "message",
        "msg",
        "text",
        "body",
        "event",
        "line",
        "MESSAGE",
        "textPayload",
        "exc",
        "exc_info",
        "exception",
    ),
    *("error", "err", "stack", "stack_trace", "stacktrace", "traceback", "details"),
)
_TIME_KEYS = ("time", "timestamp", "ts", "@timestamp", "asctime")
_OF_A_CONTAINER = (b"xitCode", b"OOMKilled", b'"reason"')
"""Kubernetes' own objects: their fields belong together."""
_SHORTEST_MESSAGE = 40
"""A shorter text beside figures names them: an event of a structured log, whose fields are the content."""
_MOST_LINES = 2_000
_ESCAPED_END = re.compile(rb"\\+r?\\*n(?=[\s\\A-Z\d\[(\"'~^]|torch|ray\.|raise|self\.|return|jax|$)")
_ENTITY = re.compile(rb"&(?:lt|gt|quot|amp|nbsp|#\d{1,4}|#x[0-9a-fA-F]{1,4});")
_TAG = re.compile(
    r"</?(?:span|br|p|div|pre|code|td|tr|th|li|ul|ol|b|i|strong|em|a|font|h\d|samp|blockquote|details|summary)\b[^>]{0,300}>"
)
_FRAME_START = re.compile(rb'File \\?"[^"\r\n]{0,400}')
_WHOLE_FRAME = re.compile(rb'File \\?"[^"]{1,400}", line \d+, in .')
_MOST_PIECES = 3
_FRAMES_IN_A_LINE = re.compile(rb'(?=File "[^"]{1,400}", line \d+, in )')
_CODE_AFTER_FRAME = re.compile(rb'^(File "[^"]{1,400}", line \d+, in [\w<>.]{1,100})\s+')
_ERROR_AFTER_CODE = re.compile(rb"\s(?=(?:\w{1,40}\.){0,5}\w{0,60}(?:Error|Exception)(?:: |\())")


class _Lines(Protocol):
    def readline(self, limit: int, /) -> bytes: ...


class _Recoded:
    """The lines of a text in UTF-16, as PowerShell writes the output of a program, in UTF-8."""

    def __init__(self, start: bytes, stream: BinaryIO) -> None:
        """`start`: bytes that have been read, with the mark of the byte order."""
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._stream = stream
        self._text = self._decoder.decode(start)

    def readline(self, limit: int, /) -> bytes:
        while "\n" not in self._text and len(self._text) < limit and (more := self._stream.readline(limit)):
            self._text += self._decoder.decode(more)
        end = min(self._text.find("\n") + 1 or limit, limit)
        line, self._text = self._text[:end], self._text[end:]
        return line.encode("utf-8", "replace")


def plain_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of `stream`, without changing those that need no change."""
    first = stream.readline(LONGEST_LINE_BYTES)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        yield from _plain(deque(), _Recoded(first, stream))
    else:
        yield from _plain(deque((first.removeprefix(codecs.BOM_UTF8),)), stream)


def _plain(ahead: deque[bytes], stream: _Lines) -> Iterator[bytes]:
    """`ahead`: lines that have been read before those of `stream`."""
    while raw := ahead.popleft() if ahead else stream.readline(LONGEST_LINE_BYTES):
        if b'File "' in raw or b'File \\"' in raw:
            raw = _whole_frame(raw, stream, ahead)
        if b"{" in raw[:40] or b"\\n" in raw or b"<" in raw or b"&" in raw or raw.count(b'File "') > 1:
            yield from _unpacked(raw)
        else:
            yield raw


def _whole_frame(raw: bytes, stream: _Lines, ahead: deque[bytes]) -> bytes:
    """A frame that a terminal has broken, with the lines that complete it; otherwise the line as it is.

    `ahead`: lines that have been read after it, to which this adds.
    """
    start = _FRAME_START.search(raw)
    if start is None or raw.count(b'File "') > 1 or not _is_broken(raw[start.start() :]):
        return raw
    while len(ahead) < _MOST_PIECES and (piece := stream.readline(LONGEST_LINE_BYTES)):
        ahead.append(piece)
    following = list(ahead)[:_MOST_PIECES]
    for count in range(1, len(following) + 1):
        pieces = [raw.rstrip(), *(piece.strip() for piece in following[:count])]
        for joined in (b"".join(pieces), b" ".join(pieces)):
            if _WHOLE_FRAME.search(joined):
                for _ in range(count):
                    ahead.popleft()
                return joined + b"\n"
    return raw


def _is_broken(frame: bytes) -> bool:
    return len(frame) < 300 and _WHOLE_FRAME.search(frame) is None


def _unpacked(raw: bytes) -> list[bytes]:
    """The lines within a line of JSON, of HTML, or of a text whose line ends are escaped or lost."""
    lines = _out_of_json(raw) or [raw]
    lines = [part for line in lines for part in _split_escaped(line)]
    lines = [_without_html(line) for line in lines]
    return [part for line in lines for part in _split_frames(line)][:_MOST_LINES]


def _out_of_json(raw: bytes) -> list[bytes] | None:
    start = raw.find(b"{")
    if start < 0 or not raw.rstrip().endswith(b"}") or any(word in raw for word in _OF_A_CONTAINER):
        return None
    try:
        found = json.loads(raw[start:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    texts = [found[key] for key in _TEXT_KEYS if isinstance(found.get(key), str)]
    figures = [value for value in found.values() if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(figures) > 1 and sum(map(len, texts)) < _SHORTEST_MESSAGE:
        return None
    time = next((found[key] for key in _TIME_KEYS if isinstance(found.get(key), str)), "")
    before = raw[:start].decode("utf-8", "replace") + (f"{time} " if time else "")
    return [
        f"{before}{line}".encode("utf-8", "backslashreplace") for text in texts for line in text.splitlines()
    ] or None


def _split_escaped(raw: bytes) -> list[bytes]:
    if raw.count(b"\\n") < 2:
        return [raw]
    parts = _ESCAPED_END.split(raw)
    return [part.replace(b'\\"', b'"').replace(b"\\t", b"\t") for part in parts] if len(parts) > 1 else [raw]


def _without_html(raw: bytes) -> bytes:
    if b"<" not in raw and not _ENTITY.search(raw):
        return raw
    text = _TAG.sub("", raw.decode("utf-8", "replace"))
    return (unescape(text) if _ENTITY.search(raw) else text).encode("utf-8", "backslashreplace")


def _split_frames(raw: bytes) -> list[bytes]:
    """Frames in one line, each in a line of its own, and so its code and the error below."""
    if raw.count(b'File "') < 2:
        return [raw]
    lines: list[bytes] = []
    for part in _FRAMES_IN_A_LINE.split(raw):
        match = _CODE_AFTER_FRAME.match(part)
        if match is None:
            lines.append(part)
            continue
        code, *errors = _ERROR_AFTER_CODE.split(part[match.end() :], maxsplit=1)
        lines.extend([b"  " + match[1], b"    " + code, *errors])
    return lines
