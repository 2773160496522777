"""Reads a log of any program once, from start to end, in bounded memory: failures and the facts around them."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from rljob_memory.evidence import log_facts
from rljob_memory.evidence.activity import (
    Activity,
    activity_of,
    activity_of_report,
    activity_of_text,
    call_of,
    code_of,
    frames_of,
)
from rljob_memory.evidence.allocator_message import (
    HEADLESS_START,
    LONGEST_MESSAGE_CHARACTERS,
    REMAINDER,
    START,
    parse_broken_message,
    parse_torn_lines,
)
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.first_failure import other_reason, secondary_name
from rljob_memory.evidence.log_facts import note_programs
from rljob_memory.evidence.log_lines import MOST_MESSAGE_LINES, LogLine, Progress, marked_time, telling_lines
from rljob_memory.evidence.mentions import reported_growth, reported_shortage
from rljob_memory.evidence.signatures import COMPILED, CORRUPT_SIZE, match_signature
from rljob_memory.evidence.unfamiliar import is_advice, is_no_shortage, is_unfamiliar_failure

_MOST_WRITERS = 256
_LONGEST_TRACEBACK = 120
_LONGEST_TEXT = 1_000
_RETRY_LINES = 6
"""A program reports so soon after a failed request that it tries again with less."""
_REPORT_LINES = 12
"""A program reports so soon after a failed request what it needed the memory for."""
_COMPILERS_REPORT_LINES = 60
"""XLA lists the parts of the program below its sums."""
_HEAD_LINES = 2
"""A message's first words and its numbers are so near, if a line end has torn them apart."""
_HEADS = frozenset({FailureKind.DRIVER, FailureKind.UNFAMILIAR})
_NEAR_LINES = 1_000
"""A traceback that ended so much earlier belongs to another failure, which the program survived."""

_OF_THE_GPU = frozenset({FailureKind.ALLOCATOR, FailureKind.DRIVER})
_RETRY = re.compile(
    r"\b(?:retrying (?:with|without|at|using|on)|falling back (?:to|on)|attempting to recover"
    r"|(?:skip(?:ping|ped)?|dropp(?:ing|ed)) (?:this |the |that )?(?:\w+ )?"
    r"(?:batch|sample|step|example|micro-?batch))\b",
    re.IGNORECASE,
)
_FAILING_LINE = re.compile(r"^-+> ?\d+ ")
"""IPython's mark of the line that failed, among the lines around it."""
_RAISE = re.compile(r"^raise \w")
_NAMED_ERROR = re.compile(r"\s*[\w.]*(?:Error|Exception)\b")
_ENGINE_WRITER = re.compile(
    r"EngineCore|LLMRayActor|RolloutRayActor|VllmWorker|AsyncVLLM|vLLMHttpServer|VllmGeneration|VLLMServer|SGLangEngine"
    r"|Worker_TP\d|RayWorkerWrapper"
)
_ENGINE_CODE = re.compile(
    r"-packages/vllm/|/vllm/(?:v1|worker|engine|executor|model_executor)/|/sglang/srt/"
    r"|/(?:text_generation_server|lorax_server|tensorrt_llm|lmdeploy)/"
)
_GPU_CODE = re.compile(r"[/\\](?:torch|vllm|sglang|deepspeed|accelerate|megatron|bitsandbytes|fairscale)[/\\]")
_ENGINE_LINE = re.compile(
    r"\b(?:text_generation|lorax)(?:_(?:client|server|launcher|router)\b|\.errors\.)|\[TensorRT-LLM\]|\[TRT-LLM\]|/tensorrt_llm/"
    r"|\[TM\]\[|/turbomind/|\bggml_\w+:|\bllama_(?:model|kv|new|init|context|decode)\w*: |\bgraph_reserve: "
    r"|Unable to warmup model"
)
"""Lines of TGI, LoRAX, TensorRT-LLM, LMDeploy and llama.cpp."""
_SHARES = re.compile(
    r"multiprocessing/(?:shared_memory|reductions|heap|synchronize)\.py|storage\.py in _(?:share|new)_"
    r"|multiprocessing/context\.py in (?:R?Lock|Condition|Event|Barrier|(?:Bounded)?Semaphore)$"
    r"|loky/\S{0,40}synchronize\.py"
)
"""Frames of code that writes to /dev/shm, where semaphores are files too."""
_STEP = re.compile(r"\b(?:global_?step|step)[ :=#]{1,3}(\d{1,9})\b", re.IGNORECASE)


@dataclass(slots=True)
class _Writer:
    """The latest lines of one process: its traceback, and a message that is not yet complete."""

    traceback: deque[str] = field(default_factory=lambda: deque(maxlen=_LONGEST_TRACEBACK))
    traceback_line: int = 0
    traceback_is_cut: bool = False
    """No error has been seen below the frames: posts often end within a traceback."""
    calls: deque[str] = field(default_factory=lambda: deque(maxlen=_LONGEST_TRACEBACK))
    """Functions that its lines report as failing, in the form of frames."""
    expects_code: bool = False
    clock: tuple[str, float] | None = None
    step: int | None = None
    unexplained: int | None = None
    """Place among all failures of the latest one, if no traceback was above it: some programs print it below."""
    unexplained_line: int = 0
    open_message: list[str] = field(default_factory=list)
    open_line: int = 0
    open_failure: Failure | None = None


class LogReader:
    """Adds the failures and facts of a log to the evidence."""

    def __init__(self, builder: EvidenceBuilder, source: str = "") -> None:
        """`source`: the file's name, for people."""
        self._builder = builder
        self._source = source
        self._writers: OrderedDict[str, _Writer] = OrderedDict()
        self._opened = _Writer()
        self._steps_shown: int | None = None
        self._steps_counted: int | None = None
        self._marked: tuple[str, float] | None = None
        self._loading_line: int | None = None
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RETRY_LINES)
        self._retried: set[int] = set()
        self._retry_line = self._last_line = 0
        self._message_line = -MOST_MESSAGE_LINES
        self._mentioned: Failure | None = None

    def read(self, stream: BinaryIO) -> None:
        for line in telling_lines(stream):
            self.read_line(line)
        for writer in self._writers.values():
            self._close_message(writer)
            self._explain(writer)
        self._mark_retried()
        self._add_raise_without_its_message()
        self._add_mention()
        self._explain_by_a_cut_traceback()

    def read_line(self, line: LogLine) -> None:
        if line.progress:
            self._note_progress(line.progress)
            if not line.text:
                return
        self._last_line = line.number
        retries = _RETRY.search(line.text) is not None
        if retries:
            self._note_retry(line.number)
        self._read_text(line)
        if retries:  # also what failed in the same line
            self._note_retry(line.number)

    def _read_text(self, line: LogLine) -> None:
        writer = self._writer(line.writer)
        log_facts.note_engine_seen(self._builder, line)
        if not self._builder.reported_growth:
            self._builder.reported_growth = reported_growth(line.text) or ""
        note_programs(self._builder, line)
        writer.clock = line.clock or writer.clock
        if (time := marked_time(line.text)) is not None:
            self._marked = "epoch", time
        if (loading := log_facts.loads_weights(line.text)) is not None:
            self._loading_line = line.number if loading else None
        if found := _STEP.search(line.text):
            writer.step = int(found[1])
        # A line that was broken by its length has lost its writer's prefix.
        continued = writer if line.writer else self._opened
        continued_message = continued.open_failure is not None
        if continued_message:
            self._continue_message(continued, line.text)
        in_traceback = self._follow_traceback(writer, line.number, line.text)
        begins = _begins_message(line.text) or (not continued_message and self._begins_headless(line))
        if begins and CORRUPT_SIZE not in line.text and not is_no_shortage(line.text):
            self._close_message(writer)
            self._open_message(writer, line)
        elif not in_traceback and not log_facts.note(self._builder, line):
            self._look_for_failure(writer, line, continued_message)

    def _begins_headless(self, line: LogLine) -> bool:
        """True if the line has a message without its first words, or what is left of one, and none was just above."""
        if HEADLESS_START.search(line.text):
            return True
        return line.number > self._message_line + MOST_MESSAGE_LINES and bool(REMAINDER.search(line.text))

    def _note_progress(self, progress: Progress) -> None:
        self._loading_line = None
        if progress.steps_done is None:
            self._steps_counted = (self._steps_counted or 0) + 1
        else:
            self._steps_shown = progress.steps_done

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
        if "Traceback (most recent call last)" in text:
            writer.unexplained = None
        if "Traceback (most recent call last)" in text or number > writer.traceback_line + _NEAR_LINES:
            writer.traceback.clear()
        if writer.expects_code and not text.strip():
            return True
        frames = frames_of(text)
        if frames:
            writer.traceback.extend(frames)
            writer.expects_code, writer.traceback_line, writer.traceback_is_cut = True, number, True
            # A program that logs JSON, or one line an error, has the message in the line of the frames.
            return "emory" not in text
        if writer.traceback and _FAILING_LINE.match(text):
            writer.traceback.append(text.strip()[:200])
            writer.expects_code, writer.traceback_line = False, number
            return True
        if call := call_of(text):
            writer.traceback.append(call)
            writer.calls.append(call)
            writer.traceback_line = number
        if text[:1].strip():
            writer.traceback_is_cut = False
        if writer.expects_code:
            writer.expects_code = False
            writer.traceback.append(text.strip()[:200])
            # The code of a `raise` contains the message that follows.
            return text.startswith(("  ", "\t")) and not _NAMED_ERROR.match(text)
        return False

    def _look_for_failure(self, writer: _Writer, line: LogLine, of_a_message: bool) -> None:
        """`of_a_message`: the line continues a message of torch's allocator, whose reader puts it together."""
        if reason := other_reason(line.text):
            self._builder.secondary[reason] += 1
        self._explain_by_report(writer, line)
        if is_no_shortage(line.text):
            return
        found = match_signature(line.text) or (None if of_a_message else _match_across(line))
        if CORRUPT_SIZE not in line.text and found:
            kind, sizes = found
            if any(is_no_shortage(text) or CORRUPT_SIZE in text for text, _ in line.in_one_piece()):
                return
            self._add(writer, replace(self._failure(writer, line, kind), sizes=sizes), line.number)
        elif "No space left on device" in line.text and any(_SHARES.search(frame) for frame in writer.traceback):
            self._add(writer, self._failure(writer, line, FailureKind.SHARED_MEMORY), line.number)
        elif name := secondary_name(line.text):
            self._builder.secondary[name] += 1
        elif line.is_routine or _RAISE.match(line.text.strip()):
            return  # Words that no rule knows count neither in a report of success nor in code.
        elif CORRUPT_SIZE not in line.text and is_unfamiliar_failure(line.text):
            self._add(writer, self._failure(writer, line, FailureKind.UNFAMILIAR), line.number)
        elif self._mentioned is None and (sentence := reported_shortage(line.text)):
            self._mentioned = self._failure(writer, replace(line, text=sentence), FailureKind.UNFAMILIAR)

    def _explain_by_report(self, writer: _Writer, line: LogLine) -> None:
        """Give the failure just above an activity, if the line reports what could not be made for lack of memory."""
        failures, place = self._builder.failures, writer.unexplained
        if place is None or place >= len(failures):
            return
        lines = _COMPILERS_REPORT_LINES if COMPILED.search(failures[place].text) else _REPORT_LINES
        if line.number > writer.unexplained_line + lines:
            return
        if activity := activity_of_report(line.text):
            failures[place] = replace(failures[place], activity=activity)
            writer.unexplained = None

    def _add(self, writer: _Writer, failure: Failure, number: int) -> None:
        self._explain(writer)
        writer.unexplained_line = number
        writer.unexplained = len(self._builder.failures) if failure.activity is None else None
        self._recent.append((number, len(self._builder.failures)))
        self._builder.add_failure(failure)
        writer.traceback.clear()

    def _explain(self, writer: _Writer) -> None:
        """Give a failure without an activity that of the traceback below it, which belongs to no other message."""
        place, writer.unexplained = writer.unexplained, None
        failures = self._builder.failures
        if place is not None and place < len(failures) and writer.traceback:
            engine = any(_ENGINE_CODE.search(frame) for frame in writer.traceback)
            failures[place] = replace(
                failures[place],
                activity=activity_of(tuple(writer.traceback)),
                role=failures[place].role or ("rollout" if engine else None),
            )

    def _note_retry(self, number: int) -> None:
        """The program retries what failed just above."""
        for writer in self._writers.values():
            self._close_message(writer)
        self._retried.update(place for failed, place in self._recent if failed >= number - _RETRY_LINES)
        self._retry_line = number

    def _mark_retried(self) -> None:
        """Mark the failures after which the program retried, if its log continues. A failed retry is reported."""
        failures = self._builder.failures
        for place in self._retried if self._last_line > self._retry_line else ():
            if place < len(failures):
                failures[place] = replace(failures[place], retried=True)

    def _add_raise_without_its_message(self) -> None:
        """A post may end within a traceback: then the text in the code of its last `raise` is all that is left."""
        if any(failure.source == self._source for failure in self._builder.failures):
            return
        for name, writer in self._writers.items():
            code = writer.traceback[-1] if writer.traceback and writer.traceback_is_cut else ""
            if _RAISE.match(code) and not is_no_shortage(code):
                line = LogLine(code, name, writer.clock, None, writer.traceback_line)
                if found := match_signature(code):
                    self._add(writer, replace(self._failure(writer, line, found[0]), sizes=found[1]), line.number)
                elif is_unfamiliar_failure(code):
                    self._add(writer, self._failure(writer, line, FailureKind.UNFAMILIAR), line.number)

    def _add_mention(self) -> None:
        """A text without a message of any program may still report a shortage, in its title above all."""
        if self._mentioned and not any(failure.source == self._source for failure in self._builder.failures):
            self._builder.add_failure(self._mentioned)

    def _explain_by_a_cut_traceback(self) -> None:
        """Give failures of the GPU without an activity that of a traceback whose own message is missing.

        The ranks of a job do the same work, and their outputs are posted in any order. A stack is more precise than the
        words of a title.
        """
        cut = [tuple(writer.traceback) for writer in self._writers.values() if writer.traceback_is_cut]
        cut.extend(tuple(writer.calls) for writer in self._writers.values() if writer.calls)
        stack = next((stack for stack in cut if activity_of(stack)), ())
        if not stack:
            return
        role = "rollout" if any(_ENGINE_CODE.search(frame) for frame in stack) else None
        in_gpu_code = any(_GPU_CODE.search(frame) for frame in stack)
        for place, failure in enumerate(self._builder.failures):
            if failure.source != self._source or (failure.activity is not None and failure is not self._mentioned):
                continue
            in_words = failure.kind is FailureKind.UNFAMILIAR
            if failure.is_of_the_gpu or in_words:
                self._builder.failures[place] = replace(
                    failure,
                    activity=activity_of(stack),
                    role=failure.role or role,
                    in_gpu_code=in_words and in_gpu_code,
                )

    def _activity(self, writer: _Writer, line: LogLine, kind: FailureKind) -> Activity | None:
        found = activity_of(tuple(writer.traceback)) or activity_of_text(line.text)
        found = found or next((each for text, _ in line.in_one_piece() if (each := activity_of_text(text))), None)
        found = found or activity_of(code_of(line.above))
        if found is None and self._loading_line is not None and kind in _OF_THE_GPU:
            return Activity.MODEL_LOAD if line.number - self._loading_line <= _NEAR_LINES else None
        return found

    def _failure(self, writer: _Writer, line: LogLine, kind: FailureKind) -> Failure:
        return Failure(
            kind,
            text=line.text.strip()[:_LONGEST_TEXT],
            activity=self._activity(writer, line, kind),
            role="rollout" if _is_engine(line, writer.traceback) else None,
            rank=line.rank,
            step=writer.step,
            steps_done=self._steps_counted if self._steps_shown is None else self._steps_shown,
            clock=self._marked or writer.clock,
            source=self._source,
        )

    def _open_message(self, writer: _Writer, line: LogLine) -> None:
        failure = self._failure(writer, line, FailureKind.ALLOCATOR)
        if head := self._taken_back_head(line.number):
            failure = replace(failure, text=head.text, activity=head.activity or failure.activity)
        writer.open_failure = failure
        writer.open_message = [line.text]
        writer.open_line = self._message_line = line.number
        writer.traceback.clear()
        self._opened = writer
        self._close_if_whole(writer)

    def _taken_back_head(self, number: int) -> Failure | None:
        """The failure just above, if it is the head of the message that begins in line `number`: its first words."""
        above, place = self._recent[-1] if self._recent else (-_REPORT_LINES, -1)
        failures = self._builder.failures
        if number - above > _HEAD_LINES or place != len(failures) - 1:
            return None
        if failures[place].kind not in _HEADS or not failures[place].is_of_the_gpu:
            return None
        self._recent.pop()
        self._builder.failure_count -= 1
        return failures.pop()

    def _continue_message(self, writer: _Writer, text: str) -> None:
        writer.open_message.append(text)
        self._close_if_whole(writer)

    def _close_if_whole(self, writer: _Writer) -> None:
        lines = writer.open_message
        too_long = len(lines) >= MOST_MESSAGE_LINES or sum(map(len, lines)) > LONGEST_MESSAGE_CHARACTERS
        if too_long or parse_broken_message(lines) is not None:
            self._close_message(writer)

    def _close_message(self, writer: _Writer) -> None:
        if writer.open_failure is None:
            return
        device = parse_broken_message(writer.open_message) or parse_torn_lines(writer.open_message)
        failure, below = replace(writer.open_failure, device=device), tuple(writer.traceback)
        writer.open_failure, writer.open_message = None, []
        self._add(writer, failure, writer.open_line)
        writer.traceback.extend(below)


def _begins_message(text: str) -> bool:
    """True if the text has the first words of a message of torch's allocator, and they are not those of advice."""
    start = START.search(text)
    if start is None:
        return False
    return bool(REMAINDER.search(text, start.start())) or not is_advice(text[: start.start()])


def _match_across(line: LogLine) -> tuple[FailureKind, dict[str, int]] | None:
    """The kind and the sizes of a failure in words that line ends have broken."""
    for text, across in line.in_one_piece():
        if found := match_signature(text, across):
            return found
        if is_unfamiliar_failure(text, across):
            return FailureKind.UNFAMILIAR, {}
    return None


def _is_engine(line: LogLine, traceback: Iterable[str]) -> bool:
    """True if the process is an inference engine, or runs the code of one."""
    if line.is_engines_error or _ENGINE_WRITER.search(line.writer) or _ENGINE_LINE.search(line.text):
        return True
    return any(_ENGINE_CODE.search(frame) for frame in traceback)
