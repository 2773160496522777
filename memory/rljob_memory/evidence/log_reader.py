"""Reads a log of any program once, from start to end, in bounded memory: its failures, with the facts around them."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import BinaryIO

from rljob_memory.evidence import facts, torch_message
from rljob_memory.evidence.activity import (
    LOADING,
    activity_of,
    activity_of_report,
    activity_of_text,
    call_of,
    code_of,
    frames_of,
)
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.lines import LogLine, WordGroups, marked_time, parse_line, pieces, raw_lines
from rljob_memory.evidence.shortage import is_advice, is_of_the_gpu, may_report, reported_shortage
from rljob_memory.evidence.signatures import NO_SHORTAGE, match_signature, pattern, words

_MOST_WRITERS = 256
_MOST_STACK_LINES = 120
_LONGEST_TEXT = 1_000
_MOST_MESSAGE_LINES = 16
"""A terminal of 80 columns breaks torch's message into nine, a narrow page into more."""
_FOLLOWING_LINES = 4
"""Read after a telling line: the code of a frame, the rest of a message, a report of the failed work."""
_HEAD_LINES = 3
"""The first words of a message and its numbers are nearer, if a line end has torn them apart."""
_HEADS = frozenset({FailureKind.DRIVER, FailureKind.UNFAMILIAR})
_RETRY_LINES = 6
"""Maximum lines between a failed request and the report that the program tries again with less."""
_REPORT_LINES = 12
"""Maximum lines between a failed request and the report of its purpose."""
_NEAR_LINES = 1_000
"""A traceback that ended more lines earlier belongs to another failure, which the program survived."""
_CODE_LINES = 3
"""Lines above an error that are searched for the failing code, if a post has no frame."""
_MESSAGE_WORDS = ("tried to alloc", "by pytorch", "total capa", "already allocated", "avoid fragmentation")
_EXHAUSTION_WORDS = (
    *("out of ", "out-of-", "outof", "oom", "vram", "heap", "arena", "exhaust", "insufficient"),
    *("failed to alloc", "存", "メモリ", "메모리", "памяти", r"\u5b58", r"\u30e1\u30e2"),
)
_OF_FACTS = 1
_MOST_FACTS, _STRIDE = 4_000, 17
"""After 4,000 lines that have only facts, such as figures of memory, every 17th is read. 17 is prime, so that lines of
each process are read if several write in turn."""
_OFTEN = 32
"""Times that a line is read. Later ones like it count as facts."""
_MOST_SHAPES = 1 << 16
_LARGE_NUMBERS = re.compile(rb"\d{4,}|\d+(?:[.:,-]\d+)+")
_FRAME_WORDS = ("file ", ".py", "traceback", "ray::", "rljob ", "shards:", "cell in")

_NAMED_ERROR = re.compile(r"\s*[\w.]*(?:Error|Exception)\b")
_FAILING_LINE = re.compile(r"^-+> ?\d+ ")
"""IPython's mark of the line that failed, among the lines around it."""
_STEP = re.compile(r"\b(?:global_?step|step)[ :=#]{1,3}(\d{1,9})\b", re.IGNORECASE)


@dataclass(slots=True)
class _Writer:
    """The latest lines of one process: its traceback, and a message of torch that is not yet complete."""

    stack: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_STACK_LINES))
    stack_line: int = 0
    expects_code: bool = False
    has_error: bool = False
    """The error below the stack has been seen: the stack explains no other one."""
    clock: tuple[str, float] | None = None
    step: int | None = None
    message: list[str] = field(default_factory=list)
    open_failure: Failure | None = None
    unexplained: int | None = None
    """Place among all failures of the latest one without an activity: some programs print its stack below."""
    unexplained_line: int = 0


class LogReader:
    """Adds the failures and facts of a log to the evidence."""

    def __init__(self, builder: EvidenceBuilder, source: str = "") -> None:
        """`source`: the file's name, for messages."""
        self._builder, self._source = builder, source
        self._writers: OrderedDict[str, _Writer] = OrderedDict()
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RETRY_LINES)
        """Line and place of the latest failures."""
        self._retried: set[int] = set()
        self._retry_line = self._last_line = 0
        self._message_line = -_MOST_MESSAGE_LINES
        self._number = 0
        """Number of the present line."""
        self._raw_above = deque[bytes](maxlen=_CODE_LINES)
        """The lines above it, the nearest last."""
        self._seen: dict[int, int] = {}
        """Times that a line has come, by its text without large numbers."""
        self._steps_done: int | None = None
        self._marked: tuple[str, float] | None = None
        self._stacks: list[tuple[str, ...]] = []
        """Stacks whose own message is missing."""
        self._raised: deque[tuple[_Writer, LogLine]] = deque(maxlen=_CODE_LINES)
        """Code of the latest `raise` lines. A quotation may end with it, before the message."""
        self._opened = _Writer()
        """That of the latest message: a line that was broken by its length has lost its writer's prefix."""

    def read(self, stream: BinaryIO) -> None:
        for line, is_known in self._telling_lines(stream):
            self._read_line(line, is_known)
            if self._builder.is_full:
                break  # a message after hundreds of others explains nothing
        for writer in self._writers.values():
            self._close_message(writer)
            self._keep_cut_stack(writer)
        if not any(failure.source == self._source for failure in self._builder.found):
            for writer, line in self._raised:
                self._look_for_failure(writer, line)
        if self._last_line > self._retry_line:  # the program continued
            self._replace(self._retried, retried=True)
        self._explain_by_other_stacks()

    def _telling_lines(self, stream: BinaryIO) -> Iterator[tuple[LogLine, bool]]:
        """The lines with a word that can matter, and a few after each; True with those whose facts are known."""
        following, facts_seen, groups = 0, 0, _groups()
        for raw, group in raw_lines(stream, groups):
            if group is None and following == 0:
                self._number += 1
                if b"%|" in raw or b"{'loss'" in raw:
                    self._note_progress(raw.decode("utf-8", "replace"))
                else:
                    self._raw_above.append(raw)
                continue
            parts = pieces(raw)
            for piece, place in zip(parts, [group] if parts == [raw] else groups.of(parts), strict=True):
                self._number += 1
                if place is None and (b"%|" in piece or b"{'loss'" in piece):
                    self._note_progress(piece.decode("utf-8", "replace"))
                    continue  # also between the parts of a message
                is_known, is_telling = self._is_known(piece), place is not None
                is_sampled = False
                if is_telling and (is_known or place == _OF_FACTS):
                    facts_seen += 1
                    is_sampled = facts_seen <= _MOST_FACTS or facts_seen % _STRIDE == 0
                    is_telling = b".py" in piece or b"raceback" in piece or (not is_known and may_report(piece))
                if is_telling or is_sampled or following > 0:
                    yield parse_line(piece), is_known and not is_sampled
                is_new = is_telling or (is_sampled and not is_known)
                following = _FOLLOWING_LINES if is_new else max(following - 1, 0)
                self._raw_above.append(piece)

    def _is_known(self, raw: bytes) -> bool:
        """True if the line has come often, but for its large numbers, and no failure is near."""
        shape = hash(_LARGE_NUMBERS.sub(b"#", raw))
        times = self._seen.get(shape, 0) + 1
        if len(self._seen) > _MOST_SHAPES:
            self._seen.clear()
        self._seen[shape] = times
        last = max(self._message_line, self._recent[-1][0] if self._recent else -_MOST_MESSAGE_LINES)
        return times > _OFTEN and self._number > last + _MOST_MESSAGE_LINES

    def _read_line(self, line: LogLine, is_known: bool) -> None:
        text, writer = line.text, self._writer(line.writer)
        self._last_line = self._number
        writer.clock = line.clock or writer.clock
        if is_known:
            self._follow_stack(writer, line)
            return
        self._note_progress(text)
        self._note_retry(line)
        if (time := marked_time(text)) is not None:
            self._marked = "epoch", time
        if "step" in line.lower and (found := _STEP.search(text)):
            writer.step = int(found[1])
        continued = writer if line.writer else self._opened
        is_a_part = continued.open_failure is not None and torch_message.is_a_part(text)
        if continued.open_failure is not None:
            self._continue_message(continued, text)
        if not is_a_part:
            facts.note(self._builder, line, self._raw_above)
        if not self._follow_stack(writer, line) and not is_a_part:
            self._look_for_failure(writer, line)
        self._note_retry(line)  # also what failed in the same line

    def _writer(self, name: str) -> _Writer:
        writer = self._writers.get(name)
        if writer is None:
            writer = self._writers[name] = _Writer()
        self._writers.move_to_end(name)
        if len(self._writers) > _MOST_WRITERS:
            self._close_message(self._writers.popitem(last=False)[1])
        return writer

    def _note_progress(self, text: str) -> None:
        if "%|" in text or "'loss'" in text or "step:" in text:
            found = list(pattern("step_done").finditer(text))
            if found:
                shown = found[-1][1] or found[-1][2]
                self._steps_done = int(shown) if shown else (self._steps_done or 0) + 1
                for writer in self._writers.values():
                    if LOADING in writer.stack:
                        writer.stack.clear()

    def _follow_stack(self, writer: _Writer, line: LogLine) -> bool:
        """True if the line belongs to a traceback."""
        text, stack = line.text, writer.stack
        is_new = "Traceback (most recent call last)" in text
        if is_new:
            writer.unexplained = None  # the stack of another error
        if is_new or self._number > writer.stack_line + _NEAR_LINES:
            self._keep_cut_stack(writer)
            stack.clear()
            writer.expects_code = False
        if frames := frames_of(text):
            stack.extend(frames)
            writer.expects_code, writer.stack_line, writer.has_error = True, self._number, False
            return "emory" not in text  # a program that logs JSON has the message in the line of the frames
        if stack and _FAILING_LINE.match(text):
            stack.append(text.strip()[:200])
            return True
        if stack and stack[-1] == LOADING and pattern("loaded").search(text):
            stack.pop()
        if call := call_of(text):
            stack.append(call)
            writer.stack_line, writer.has_error = self._number, False
            return False
        if writer.expects_code and text.strip():
            writer.expects_code = False
            if not _NAMED_ERROR.match(text):
                stack.append(text.strip()[:200])
                if text.lstrip().startswith("raise "):
                    self._raised.append((writer, line))
                return text[:1].isspace()
        if text[:1].strip():
            writer.has_error = True
        return False

    def _keep_cut_stack(self, writer: _Writer) -> None:
        if writer.stack and not writer.has_error and len(self._stacks) < _MOST_WRITERS:
            self._stacks.append(tuple(writer.stack))

    def _look_for_failure(self, writer: _Writer, line: LogLine) -> None:
        text = line.text
        match = match_signature(text)
        if match and match.signature.kind == NO_SHORTAGE:
            return
        if self._begins_message(line):
            self._open_message(writer, line)
        elif match and match.kind is None:
            self._builder.secondary[match.signature.name] += 1
        elif self._explain_by_report(writer, line):
            return
        elif match and match.kind:
            failure = self._failure(writer, line, match.kind)
            failure = failure.changed(sizes=dict(match.sizes), unless=match.signature.unless)
            of_torch = True if match.kind is FailureKind.UNFAMILIAR else None
            self._add(writer, failure.changed(of_the_gpu=of_torch), self._number)
        elif "No space left on device" in text and _has(writer.stack, "shared_memory_code"):
            self._add(writer, self._failure(writer, line, FailureKind.SHARED_MEMORY), self._number)
        elif not line.is_routine and (sentence := reported_shortage(text)):
            failure = self._failure(writer, line, FailureKind.UNFAMILIAR)
            self._add(writer, failure.changed(text=sentence, of_the_gpu=is_of_the_gpu(text)), self._number)

    def _begins_message(self, line: LogLine) -> bool:
        """True if the line has the first words of torch's message, or what is left of one, and none was just above."""
        text = line.text
        if "alloc" not in line.lower and "of memory" not in line.lower and "fragmentation" not in line.lower:
            return False
        if pattern("message_start").search(text):
            return pattern("no_advice").search(text) is not None or not is_advice(text)
        is_far = self._number > self._message_line + _MOST_MESSAGE_LINES
        return is_far and pattern("message_remainder").search(text) is not None

    # Failures, with the activity of the stack above, of the message itself, or of the stack below.

    def _failure(self, writer: _Writer, line: LogLine, kind: FailureKind) -> Failure:
        is_engine = line.is_engines_error or _has([line.writer], "engine_writer") or _has([line.text], "engine_line")
        return Failure(
            kind=kind,
            text=line.text.strip()[:_LONGEST_TEXT],
            activity=activity_of(tuple(writer.stack))
            or activity_of_text(line.text)
            or activity_of(code_of([parse_line(raw).text for raw in self._raw_above])),
            role="rollout" if is_engine or _has(writer.stack, "engine_code") else None,
            rank=line.rank,
            step=writer.step,
            steps_done=self._steps_done,
            clock=self._marked or writer.clock,
            source=self._source,
        )

    def _add(self, writer: _Writer, failure: Failure, number: int) -> None:
        writer.unexplained_line = number
        writer.unexplained = len(self._builder.found) if failure.activity is None else None
        self._recent.append((number, len(self._builder.found)))
        self._builder.add_failure(failure)
        writer.stack.clear()

    def _explain_by_report(self, writer: _Writer, line: LogLine) -> bool:
        """True if the line names the work that lacked memory, just below a failure without an activity."""
        if writer.unexplained is None or self._number > writer.unexplained_line + _REPORT_LINES:
            return False
        activity = activity_of_report(line.text)
        if activity is not None:
            self._replace([writer.unexplained], activity=activity)
            writer.unexplained = None
        return activity is not None

    def _explain_by_other_stacks(self) -> None:
        """Give failures without an activity that of a stack whose own message is missing: the ranks of a job do the
        same work, and their outputs are posted in any order."""
        stack = next((stack for stack in reversed(self._stacks) if activity_of(stack)), None)
        if stack is None:
            return
        role = "rollout" if _has(stack, "engine_code") else None
        of_the_gpu = True if _has(stack, "gpu_code") else None
        for place, failure in enumerate(self._builder.found):
            may_be_of_the_gpu = failure.is_of_the_gpu or failure.kind is FailureKind.UNFAMILIAR
            if failure.source == self._source and failure.activity is None and may_be_of_the_gpu:
                self._builder.found[place] = failure.changed(
                    activity=activity_of(stack),
                    role=role if failure.role is None else failure.role,
                    of_the_gpu=of_the_gpu if failure.of_the_gpu is None else failure.of_the_gpu,
                )

    def _note_retry(self, line: LogLine) -> None:
        """If the program retries what failed just above, that failure does not count."""
        failed = {place for number, place in self._recent if number >= self._number - _RETRY_LINES}
        is_open = any(writer.open_failure for writer in self._writers.values())
        if not (failed or is_open) or not pattern("retry").search(line.text):
            return
        for writer in self._writers.values():
            self._close_message(writer)
        self._retried.update(place for number, place in self._recent if number >= self._number - _RETRY_LINES)
        self._retry_line = self._number

    def _replace(self, places: Iterable[int], **values: object) -> None:
        failures = self._builder.found
        for place in places:
            if place < len(failures):
                failures[place] = failures[place].changed(**values)

    # torch's message, which can span lines.

    def _open_message(self, writer: _Writer, line: LogLine) -> None:
        head, place = self._recent[-1] if self._recent else (-_HEAD_LINES, -1)
        failures = self._builder.found
        if self._number - head < _HEAD_LINES and place == len(failures) - 1 and failures[place].kind in _HEADS:
            failures.pop()  # its first words, which a line end has torn off
            self._builder.failures -= 1
            self._recent.pop()
        self._close_message(self._opened)
        self._opened = writer
        writer.open_failure, writer.message = self._failure(writer, line, FailureKind.ALLOCATOR), []
        writer.unexplained_line = self._message_line = self._number
        writer.stack.clear()
        self._continue_message(writer, line.text)

    def _continue_message(self, writer: _Writer, text: str) -> None:
        lines = writer.message
        lines.append(text)
        too_long = len(lines) >= _MOST_MESSAGE_LINES or sum(map(len, lines)) > torch_message.LONGEST_MESSAGE_CHARACTERS
        if too_long or pattern("message_end").search("".join(lines)):
            self._close_message(writer)

    def _close_message(self, writer: _Writer) -> None:
        if writer.open_failure is None:
            return
        failure = writer.open_failure.changed(device=torch_message.parse_message(writer.message))
        below = tuple(writer.stack)
        writer.open_failure, writer.message = None, []
        self._add(writer, failure, writer.unexplained_line)
        writer.stack.extend(below)


@cache
def _groups() -> WordGroups:
    """Return the words of failures and of facts, in lower case. Every line that can matter has one of them."""
    return WordGroups((*words(), *_MESSAGE_WORDS, *_EXHAUSTION_WORDS, *_FRAME_WORDS), (*facts.WORDS, "rank", "step"))


def _has(lines: Iterable[str], name: str) -> bool:
    return any(pattern(name).search(line) for line in lines)
