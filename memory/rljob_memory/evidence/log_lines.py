"""The lines of a log as text: bounded in length, without colours, with their writer and their time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import BinaryIO

from rljob_memory.evidence.plain_lines import plain_lines

MOST_MESSAGE_LINES = 16
"""A terminal of 80 columns breaks torch's message into nine, a narrow page into more."""

_FRAME_LINES = 4
"""A frame, its code, the marks below the code, and the error that may follow."""

_TELLING = (
    b"mem",
    b"Mem",
    b"batch_size",
    b"offload",
    b"LLM engine (v",
    b"==0.",
    b"==1.",
    b"micro_train",
    b"dynamic_b",
    b"max_token",
    b"_bucket_",
    b"-fraction-",
    b"max_model_len",
    b"max_num_seqs",
    b"xhausted",
    b"resume",
    b"File ",
    b".py in ",
    b".py](http",
    b"\xe2\x94\x82",
    b"lloc",
    b"OOM",
    b"oom",
    b"shm",
    b"us error",
    b"SIG",
    b"illed",
    b"xit",
    b"because it is full",
    b"EngineCore died",
    b"vLLM",
    b"vllm",
    b"LLMRayActor",
    b"EngineDead",
    b"UBLAS",
    b"CUDNN",
    b"No space",
    b"CUDA",
    b"uda ",
    b"HIP",
    b"MiB",
    b"GiB",
    b"Watchdog",
    b"ActorDied",
    b"roken",
    b"peer",
    b"ChildFailed",
    b"/torch_",
    b"Traceback",
    b"to wake up",
    b"to fall asleep",
    b"KV Cache",
    b"PyTorch",
    b"MA ",
    b"NCCL",
    b"rljob 20",
    b"/dev/shm",
    b"rljob-probe: ",
    b"KV cache",
    b"ALLOC_FAILED",
    b" shards: ",
    b" to load model",
    b"eights took",
    b"loading took",
    b"oad weight ",
    b"ray::",
    b"'s function ",
    b"xecuting method ",
    b"egmentation fault",
    b"RAM",
    b"MEM",
    b"vram",
    b"rss",
    b"RSS",
    b"heap",
    b"GB",
    b"arena",
    b"HBM",
    b"1455",
    b"aging file",
    b"arameters",
    b"params",
    b"vocab_size",
    b"dtype",
    b" took ",
    b"OUT_OF_ME",
    b"eason",
    b"iveness",
    b"DUE TO",
    b"Spot ",
    b"/sleep?",
    b"sleep(level",
    b"profiled value",
    b"state_dict",
    b"total_vm",
    b"] [ ",
    b"IndexError",
    b"ObjectStore",
    b" 137",
    b"Assertion",
    b"peicher",
    b"xecutable batch",
    b"HLO temp",
    b" forward ",
    b" backward ",
    b"op failed",
    b"KvCache",
    b"CannotStart",
    b"fatal signal",
    b"sigquit",
)
"""Every line that can matter has one of these. Looking for words is several times faster than a regular expression."""
_FOREIGN_TELLING = tuple(
    word.encode() for word in ("显存", "内存", "爆存", "메모리", "メモリ", "памяти", "mémoire", "不足")
)
"""Memory in other languages, in a line that is not ASCII."""
_REST_OF_A_LINE = 2
_CODE_LINES = 3
"""Lines above an error that are looked at if a post has the failing code, but no frame."""
_LONGEST_CODE_BYTES = 400
_METRICS = re.compile(rb"\bstep:(\d{1,9}) - \w|\{'loss': ")
"""In the line of metrics that ends a step: of verl's trainer, of transformers' trainers."""
_BAR = re.compile(rb"(?:^|\r)\s{0,4}\d{1,3}%\|[^|\r]{0,200}\| {0,9}(\d{1,9})/\d{1,9} \[")
"""tqdm's bar without a title: a trainer's steps."""
_BAR_BYTES = 400
_METRICS_HEAD_BYTES = 200
_COLOUR = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\^\[\[[0-9;]*m|\\(?:x1b|033|u001b)\[[0-9;]*m|\u241b\[[0-9;]*m|\[\d{1,3}(?:;\d{1,3}){0,5}m"
)
"""Escape codes, also those that a page shows as text or without the escape."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_PREFIX = re.compile(
    r"^\s*(?:\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]?(?:[-|][ \t]?)?|"
    # the kernel's and systemd's logs, containerd's, GitHub's, those of Python's loggers
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,60} [\w./-]{1,60}(?:\[\d+\])?: ?|"
    r"std(?:err|out) [FP] |##\[\w{1,10}\]|"
    r"(?:CRITICAL|ERROR|WARNING|INFO|DEBUG):[\w.]{1,60}:|"
    r"(?:CRITICAL|ERROR|WARNING|INFO|DEBUG) {0,4}[-|] ?(?:[\w.]{1,60}:[\w<>]{1,40}:\d{1,5} - )?|"
    r"[-*] (?=\S| {2})|"
    r"\((?!OOM\))(?P<name>[\w.:-]{1,80}(?: rank=\d+)?)(?: \w+)?(?: pid=(?P<pid>\d+))?(?:, ip=(?P<ip>[\d.]+))?\)\s?|"
    r"\[(?:rank|default)(?P<rank>\d+)\]:\s?|"
    r"(?P<level>ERROR|WARNING|INFO|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]+:\d+\] ?|"
    r"\[[A-Z][A-Za-z]{2,8}\]\s|"
    r"[\w-]{1,60}\s+\| |"
    r"\| (?=\d{4}-\d\d-\d\dT)|"
    r"\[(?P<pod>pod/[\w./-]{1,200})\] )"
)
_QUOTED = re.compile(r"^(?:> ?|E(?= {3}))")
"""A quotation in a post; pytest's marks of the failing line and of the error."""
_MARKED = re.compile(r"^ {0,3}(\*\*|`{1,3})(.*)\1\s*$")
"""A whole line in bold type or as code, in Markdown."""
_ISO_TIME = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_SHORT_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_MOST_PIECES = 2
_SHORTEST_BROKEN = 30
_ENDS = tuple(bytes((each,)) for each in b".:;!?}>")
_BROKEN = re.compile(r"^.{2,240}[^\s.:;!?}\]>]\s{0,2}$")
"""A line that may have been broken by its length: long, and without the end of a sentence."""
_RANK = re.compile(r"\brank[=\[ ](\d{1,6})\b|\[(?:rank|default)(\d{1,6})\]")


_ROUTINE = re.compile(r"\b(?:INFO|DEBUG)\b|\b(?:level|severity)[\"']?\s?[:=]\s?[\"']?(?:info|debug)\b")
_SERIOUS = re.compile(r"\b(?:WARN(?:ING)?|ERROR|CRITICAL|FATAL|EXCEPTION)\b")
_LEVEL_CHARACTERS = 120
_TIME_MARK = re.compile(r"^rljob (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z ")


@dataclass(frozen=True, slots=True)
class Progress:
    """A line that shows the progress of a training."""

    steps_done: int | None
    """Steps that are done; None if the line only shows that one more is."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line and its writer."""

    text: str
    """Without colours and prefixes."""

    writer: str
    """Distinguishes interleaved processes; empty if the line names no process."""

    clock: tuple[str, float] | None
    """Format of the first time stamp, and its seconds: since the epoch if it names its zone."""

    rank: int | None
    """Rank in the prefix."""

    number: int = 0
    """Number of the line in its file."""

    is_engines_error: bool = False
    """It has the head of an error in vLLM's log, and not of one of its diffusion models, which have no KV cache."""

    is_routine: bool = False
    """Its program has logged it as information."""

    progress: Progress | None = None

    raw_above: tuple[bytes, ...] = ()
    """The lines above it, the nearest last."""

    @property
    def above(self) -> tuple[str, ...]:
        """The lines above it without colours and prefixes, the nearest last."""
        return tuple(parse_line(raw[:_LONGEST_CODE_BYTES]).text for raw in self.raw_above)

    def in_one_piece(self) -> list[tuple[str, int]]:
        """The text with the lines above it, if it can be the rest of a line that a terminal or a page has broken.

        Broken between words or within one; the nearest line alone first. Each with the place of the last break.
        """
        if not self.raw_above or not _may_be_broken(self.raw_above[-1].rstrip()):
            return []
        if self.clock or self.text[:2].isspace() or not self.text.strip():
            return []
        joined: list[tuple[str, int]] = []
        between = within = ""
        for above, raw in reversed(tuple(zip(self.above, self.raw_above, strict=True))[-_MOST_PIECES:]):
            if len(raw) < _SHORTEST_BROKEN or not _BROKEN.search(above):
                break
            between, within = f"{above.rstrip()} {between}", above + within
            joined.extend((f"{before}{self.text}", len(before)) for before in (between, within))
        return joined


def telling_lines(stream: BinaryIO) -> Iterator[LogLine]:
    """The lines that can matter, and those after them that may belong to them.

    Such are the code of a traceback's frame and the rest of a message that was broken.
    """
    following = number = 0
    recent: deque[bytes] = deque(maxlen=_CODE_LINES + 1)
    for raw in plain_lines(stream):
        number += 1
        recent.append(raw)
        progress = _progress(raw)
        if b"out of memory" in raw or b"exceed allowed memory" in raw:
            following = MOST_MESSAGE_LINES
        elif b"File " in raw or b".py in " in raw or b".py](http" in raw:
            following = max(following, _FRAME_LINES)
        elif _is_telling(raw):
            if _may_be_broken(raw.rstrip()):
                following = max(following, _REST_OF_A_LINE)
        elif progress:
            # A line of its own, also between the parts of a message.
            yield LogLine("", "", None, None, number, progress=progress)
            continue
        elif following == 0:
            continue
        following = max(following - 1, 0) if raw.strip() else following
        yield replace(parse_line(raw, number), progress=progress, raw_above=tuple(recent)[:-1])


def _progress(raw: bytes) -> Progress | None:
    if match := _METRICS.search(raw, 0, _METRICS_HEAD_BYTES):
        return Progress(int(match[1]) if match[1] else None)
    if b"%|" in raw and (bars := _BAR.findall(raw[-_BAR_BYTES:])):
        return Progress(int(bars[-1]))
    return None


def _may_be_broken(raw: bytes) -> bool:
    """True if the line may continue in the next one: it is neither short nor very long, nor the end of a sentence."""
    return _SHORTEST_BROKEN <= len(raw) <= _LONGEST_CODE_BYTES and raw[-1:] not in _ENDS


def _is_telling(raw: bytes) -> bool:
    for word in _TELLING:  # A generator takes twice as long, and this is where the time goes.
        if word in raw:
            return True
    if not raw.isascii() and any(word in raw for word in _FOREIGN_TELLING):
        return True
    return b" -> " in raw and b".py:" in raw


def parse_line(raw: bytes, number: int = 0) -> LogLine:
    """Parse a line of any bytes; bytes that are not UTF-8 are replaced."""
    text = _CONTROL.sub(" ", _COLOUR.sub("", raw.decode("utf-8", "replace").rstrip("\r\n")))
    head = text[:400]
    clock = _clock(head)
    rank = next((int(found) for match in _RANK.finditer(head) for found in match.groups() if found), None)
    writer: list[str] = []
    is_engines_error = False
    text = _QUOTED.sub("", text)
    if text[-1:] in ("*", "`") and (marked := _MARKED.match(text)):
        text = marked[2]
    while (match := _PREFIX.match(text)) and match.end():
        writer.extend(
            found for found in (match["pod"], match["name"], match["pid"], match["ip"], match["rank"]) if found
        )
        is_engines_error |= match["level"] == "ERROR" and "diffusion" not in match[0]
        text = text[match.end() :]
    return LogLine(text, " ".join(writer), clock, rank, number, is_engines_error, _is_routine(head))


def _is_routine(head: str) -> bool:
    start = head[:_LEVEL_CHARACTERS]
    return _ROUTINE.search(start) is not None and not _SERIOUS.search(start)


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


def time_mark(time: datetime, event: str) -> str:
    """A line that dates the lines after it: libraries print without a time. `time` may be in any zone."""
    return f"rljob {time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z {event}"


def marked_time(text: str) -> float | None:
    """The time in a time mark, in seconds since the epoch; None for other lines."""
    match = _TIME_MARK.match(text)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
