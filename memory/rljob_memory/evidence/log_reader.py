"""Reads a log of any program once, from start to end, in bounded memory: failures and the facts around them."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from rljob_memory.evidence import log_facts
from rljob_memory.evidence.activity import activity_of
from rljob_memory.evidence.allocator_message import (
    LONGEST_MESSAGE_CHARACTERS,
    START,
    parse_allocator_message,
    parse_request,
)
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.failure import DeviceMemory, Failure, FailureKind
from rljob_memory.evidence.log_lines import MOST_MESSAGE_LINES, LogLine, marked_time, telling_lines
from rljob_memory.evidence.signatures import CORRUPT_SIZE, match_signature, secondary_name

_MOST_WRITERS = 256
_LONGEST_TRACEBACK = 120
_LONGEST_TEXT = 1_000
_NEAR_LINES = 1_000
"""A traceback that ended so much earlier belongs to another failure, which the program survived."""

_FRAME = re.compile(r'File \\?"([^"\\]{1,400})\\?", line \d+, in ([\w<>.]{1,100})')
_NAMED_ERROR = re.compile(r"\s*[\w.]*(?:Error|Exception)\b")
_ENGINE_WRITER = re.compile(r"EngineCore|LLMRayActor|VllmWorker|AsyncVLLM")
_ENGINE_CODE = re.compile(r"-packages/vllm/")
_STEP = re.compile(r"\b(?:global_?step|step)[ :=#]{1,3}(\d{1,9})\b", re.IGNORECASE)


@dataclass(slots=True)
class _Writer:
    """The latest lines of one process: its traceback, and a message that is not yet complete."""

    traceback: deque[str] = field(default_factory=lambda: deque(maxlen=_LONGEST_TRACEBACK))
    traceback_line: int = 0
    expects_code: bool = False
    clock: tuple[str, float] | None = None
    step: int | None = None
    open_message: list[str] = field(default_factory=list)
    open_failure: Failure | None = None


class LogReader:
    """Adds the failures and facts of a log to the evidence."""

    def __init__(self, builder: EvidenceBuilder, source: str = "") -> None:
        """`source`: the file's name, for people."""
        self._builder = builder
        self._source = source
        self._writers: OrderedDict[str, _Writer] = OrderedDict()
        self._opened = _Writer()
        self._marked: tuple[str, float] | None = None

    def read(self, stream: BinaryIO) -> None:
        for line in telling_lines(stream):
            self.read_line(line)
        for writer in self._writers.values():
            self._close_message(writer)

    def read_line(self, line: LogLine) -> None:
        writer = self._writer(line.writer)
        log_facts.note_engine_seen(self._builder, line)
        writer.clock = line.clock or writer.clock
        if (time := marked_time(line.text)) is not None:
            self._marked = "epoch", time
        if found := _STEP.search(line.text):
            writer.step = int(found[1])
        # A line that was broken by its length has lost its writer's prefix.
        continued = writer if line.writer else self._opened
        if continued.open_failure:
            self._continue_message(continued, line.text)
        in_traceback = self._follow_traceback(writer, line.number, line.text)
        if START.search(line.text) and CORRUPT_SIZE not in line.text:
            self._close_message(writer)
            self._open_message(writer, line)
        elif not in_traceback and not log_facts.note(self._builder, line):
            self._look_for_failure(writer, line)

    def _writer(self, name: str) -> _Writer:
        writer = self._writers.get(name)
        if writer is None:
            writer = self._writers[name] = _Writer()
            if len(self._writers) > _MOST_WRITERS:
                _, oldest = self._writers.popitem(last=False)
                self._close_message(oldest)
        self._writers.move_to_end(name)
        return writer

    def _follow_traceback(self, writer: _Writer, number: int, text: str) -> bool:
        """True if the line belongs to a traceback."""
        if "Traceback (most recent call last)" in text or number > writer.traceback_line + _NEAR_LINES:
            writer.traceback.clear()
        frames = _FRAME.findall(text)
        if frames:
            writer.traceback.extend(f"{file} in {function}" for file, function in frames)
            writer.expects_code, writer.traceback_line = True, number
            # A program that logs JSON, or one line an error, has the message in the line of the frames.
            return "emory" not in text
        if writer.expects_code:
            writer.expects_code = False
            writer.traceback.append(text.strip()[:200])
            # The code of a `raise` contains the message that follows.
            return text.startswith(("  ", "\t")) and not _NAMED_ERROR.match(text)
        return False

    def _look_for_failure(self, writer: _Writer, line: LogLine) -> None:
        if CORRUPT_SIZE not in line.text and (found := match_signature(line.text)):
            kind, sizes = found
            self._builder.add_failure(replace(self._failure(writer, line, kind), sizes=sizes))
            writer.traceback.clear()
        elif name := secondary_name(line.text):
            self._builder.secondary[name] += 1

    def _failure(self, writer: _Writer, line: LogLine, kind: FailureKind) -> Failure:
        return Failure(
            kind,
            text=line.text.strip()[:_LONGEST_TEXT],
            activity=activity_of(tuple(writer.traceback)),
            role="rollout" if _is_engine(line.writer, writer.traceback) else None,
            rank=line.rank,
            step=writer.step,
            clock=self._marked or writer.clock,
            source=self._source,
        )

    def _open_message(self, writer: _Writer, line: LogLine) -> None:
        writer.open_failure = self._failure(writer, line, FailureKind.ALLOCATOR)
        writer.open_message = [line.text]
        writer.traceback.clear()
        self._opened = writer
        self._close_if_whole(writer)

    def _continue_message(self, writer: _Writer, text: str) -> None:
        writer.open_message.append(text)
        self._close_if_whole(writer)

    def _close_if_whole(self, writer: _Writer) -> None:
        lines = writer.open_message
        too_long = len(lines) >= MOST_MESSAGE_LINES or sum(map(len, lines)) > LONGEST_MESSAGE_CHARACTERS
        if too_long or _joined(lines) is not None:
            self._close_message(writer)

    def _close_message(self, writer: _Writer) -> None:
        if writer.open_failure is None:
            return
        device = _joined(writer.open_message) or parse_request(" ".join(writer.open_message))
        self._builder.add_failure(replace(writer.open_failure, device=device))
        writer.open_failure, writer.open_message = None, []


def _joined(lines: Sequence[str]) -> DeviceMemory | None:
    """The message in lines that were broken between words or within one."""
    return parse_allocator_message(" ".join(lines)) or parse_allocator_message("".join(lines))


def _is_engine(writer: str, traceback: Iterable[str]) -> bool:
    """True if the process is a vLLM engine, or runs the code of one."""
    return bool(_ENGINE_WRITER.search(writer)) or any(_ENGINE_CODE.search(line) for line in traceback)
