"""Damaged evidence (cut, broken, interleaved, endless, in another dress) is read, and makes no wrong cause certain."""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from html import escape
from io import BytesIO
from time import process_time
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.read import read_ledger, read_memory_log
from rljob_memory.evidence.reports import read_document
from rljob_memory.sizes import MIB
from rljob_testing.memory_plans import memory_failure
from tests.unit.memory.diagnosis.recorded import SURE, diagnoses_of, evidence_of, public_failures, recorded_texts

TEXTS = {path: text.encode() for path, text in recorded_texts().items()}
texts = st.sampled_from(sorted(TEXTS))


def classes_of(log: bytes) -> set[str]:
    return {str(found.failure_class) for found in diagnose(evidence_of(log))}


def sure_of(log: bytes | str) -> set[str]:
    return {str(found.failure_class) for found in diagnose(evidence_of(log)) if found.confidence > SURE}


@given(texts, st.data())
def test_a_truncated_log_gets_no_confident_wrong_diagnosis(path: Any, data: st.DataObject) -> None:
    whole = TEXTS[path]
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    assert sure_of(whole[begin:end]) <= classes_of(whole) | {path.parent.name}


@given(texts, texts, st.randoms(use_true_random=False))
def test_interleaved_logs_get_no_confident_third_diagnosis(one: Any, other: Any, chance: random.Random) -> None:
    lines = [TEXTS[one].splitlines(keepends=True), TEXTS[other].splitlines(keepends=True)]
    mixed = b""
    while lines[0] or lines[1]:
        mixed += chance.choice([source for source in lines if source]).pop(0)
    expected = {path.parent.name for path in (one, other)}
    assert sure_of(mixed) <= expected | classes_of(TEXTS[one]) | classes_of(TEXTS[other])


def damaged(path: Any, chance: random.Random) -> bytes:
    """The lines of a log cut and shuffled, with other bytes in between."""
    lines = [line[: chance.randint(0, len(line) + 1)] for line in TEXTS[path].splitlines()]
    chance.shuffle(lines)
    found = bytearray(b"\n".join(lines) or b"-")
    for _ in range(chance.randint(0, 30)):
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)


@given(st.binary(max_size=4_000) | st.builds(damaged, texts, st.randoms(use_true_random=False)))
def test_any_bytes_are_read_without_an_error(log: bytes) -> None:
    for found in diagnose(evidence_of(log)):
        assert 0 < found.confidence <= 1


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_garbage_around_a_failure_does_not_change_its_diagnosis(path: Any) -> None:
    chance = random.Random(3)
    garbage = b"".join(bytes(chance.choices(range(128, 256), k=200)) + b"\n" for _ in range(40))
    progress = "Training: 37%|███▋      | 37/100 [00:12<00:20, 3.1it/s]\r\n".encode() * 50
    log = garbage + progress + TEXTS[path] + b"\n" + progress + garbage
    assert diagnose(evidence_of(log)) == diagnose(evidence_of(TEXTS[path]))


# --- a failure in another dress: prefixes, JSON, HTML, broken or joined lines, cut messages ---

CASES = {path.stem: (text, (path.parent.name,)) for path, text in [*recorded_texts().items()][::3]} | {
    f"{case['set']}/{case['name']}": (case["text"], tuple(case["label"])) for case in public_failures()[::4]
}
"""Texts with their accepted classes: some of the recorded failures, and of those in public threads."""


@pytest.fixture(scope="module")
def first_classes() -> dict[str, list[str]]:
    """The first class of each case as it is."""
    return {name: first_class(text) for name, (text, _) in CASES.items()}


def first_class(text: str) -> list[str]:
    return [str(each.failure_class) for each in diagnoses_of(text)[:1]]


def each_line(change: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: "\n".join(change(line) for line in text.splitlines())


def in_json(line: str) -> str:
    return json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-03-04T10:11:12.123456789Z"})


PREFIXES = {
    "Ray's name and pid": "\x1b[36m(TaskRunner pid=55, ip=10.0.0.1)\x1b[0m ",
    "torchrun's rank": "[rank3]: ",
    "a time": "2026-03-04 10:11:12,345 - ERROR - ",
    "containerd's stream": "2026-03-04T10:11:12.123456789Z stderr F ",
    "the system's log": "Mar  4 10:11:12 node-7 train[4123]: ",
    "kubectl's pod": "[pod/trainer-0/main] ",
    "Compose's service": "trainer-1  | ",
    "a quotation": "> ",
    "Python's logger": "ERROR:root:",
    "loguru's head": "2026-03-04 10:11:12.345 | ERROR    | __main__:run:52 - ",
}
DRESSES: dict[str, Callable[[str], str]] = {
    **{name: each_line(prefix.__add__) for name, prefix in PREFIXES.items()},
    "colors": each_line(lambda line: f"\x1b[31m{line}\x1b[0m"),
    "Docker's JSON": each_line(in_json),
    "JSON of one line": lambda text: json.dumps({"level": "error", "exc_info": text}),
    "HTML": each_line(lambda line: f'<span class="line">{escape(line)}</span><br>'),
    "Markdown": each_line(lambda line: f"`{line}`"),
    "line ends of Windows": lambda text: text.replace("\n", "\r\n"),
    "paths of Windows": lambda text: re.sub(r'"/[^"]*"', lambda path: path[0].replace("/", "\\"), text),
}
"""Changes that keep every word in place."""


@pytest.mark.parametrize("dress", DRESSES)
def test_a_dress_changes_no_first_diagnosis(dress: str, first_classes: dict[str, list[str]]) -> None:
    """But of 2 %: tables lose their form behind a prefix, as those of nvidia-smi and of df."""
    dressed = {name: first_class(DRESSES[dress](text)) for name, (text, _) in CASES.items()}
    changed = {name: found for name, found in dressed.items() if found != first_classes[name]}
    assert len(changed) <= 0.02 * len(CASES), changed
    assert all(changed.values()), "no failure is lost"


MESSAGES = sorted(name for name, (text, accepted) in CASES.items() if accepted and "Tried to allocate" in text)
"""Cases with the message of torch's allocator."""


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(50, 160))
def test_a_broken_message_is_found_and_not_mistaken(name: str, width: int) -> None:
    text, accepted = CASES[name]
    lines = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()]
    wrapped = "\n".join("\n".join(pieces) for pieces in lines)
    assert diagnoses_of(wrapped)
    assert sure_of(wrapped) <= set(accepted)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_that_is_cut_is_never_silent(name: str, data: st.DataObject) -> None:
    """The cut leaves at least one of the phrases that only torch's message has."""
    text, accepted = CASES[name]
    message = text.index("Tried to allocate")
    begin = data.draw(st.integers(0, message))
    end = data.draw(st.integers(min(message + 45, len(text)), len(text)))
    assert diagnoses_of(text[begin:end])
    assert sure_of(text[begin:end]) <= set(accepted)


MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.84 GiB. GPU 1 has a total capacity of 79.10 GiB "
    "of which 1.33 GiB is free. Process 7002 has 13.01 GiB memory in use. Including non-PyTorch memory, this process "
    "has 64.55 GiB memory in use. Of the allocated memory 60.20 GiB is allocated by PyTorch, with 258.09 MiB allocated "
    "in private pools (e.g., CUDA Graphs), and 2.57 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_any_part_of_a_message_is_a_failure() -> None:
    remainders = [f"some line\n{MESSAGE[begin:]}\nanother line" for begin in range(0, len(MESSAGE) - 60, 7)]
    beginnings = [f"some line\n{MESSAGE[:end]}" for end in range(40, len(MESSAGE), 7)]
    assert [part for part in remainders + beginnings if not diagnoses_of(part)] == []
    assert [part for part in remainders + beginnings if sure_of(part)] == []


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_broken_message_keeps_its_numbers(width: int) -> None:
    broken = [MESSAGE[start : start + width] for start in range(0, len(MESSAGE), width)]
    whole, pieces = diagnoses_of(MESSAGE)[0], diagnoses_of(*broken)[0]
    assert (pieces.failure_class, pieces.numbers) == (whole.failure_class, whole.numbers)


# --- files of a run ---

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
memory_lines = st.dictionaries(
    st.sampled_from(
        [
            *("time", "step", "phase", "micro_batch", "allocated", "reserved", "device_total"),
            *("host_used", "host_limit", "oom_kills", "shm_used", "shm_size"),
        ]
    ),
    json_values | st.sampled_from(["load", "update"]) | st.integers(0, 1 << 40),
)
ledger_lines = st.fixed_dictionaries(
    {"kind": st.sampled_from(["attempt", "plan_change", "step", "other"]) | json_values},
    optional={name: json_values for name in ("started_at", "plan", "versions", "change")},
)


@settings(max_examples=40)
@example([], [{"kind": "plan_change", "change": {"time": "noon"}}])
@given(st.lists(memory_lines, max_size=6), st.lists(ledger_lines, max_size=3))
def test_a_runs_files_may_hold_anything(memory: list[dict[str, Any]], ledger: list[dict[str, Any]]) -> None:
    builder = EvidenceBuilder()
    read_memory_log(builder, BytesIO(b"\n".join(json.dumps(line).encode() for line in memory)), "policy-0")
    read_ledger(builder, BytesIO(b"\n".join(json.dumps(line).encode() for line in ledger)))
    for found in diagnose(builder.build()):
        json.dumps(found.as_dict())


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(memory_failure().model_dump())), json_values, max_size=4))
def test_a_snapshot_with_other_values_is_read_or_ignored(changes: dict[str, Any]) -> None:
    text = json.dumps(memory_failure().model_dump(mode="json") | changes)
    builder = EvidenceBuilder()
    assert read_document(builder, text, "oom") == bool(builder.snapshots)
    for found in diagnose(builder.build()):
        json.dumps(found.as_dict())


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000])
def test_endlessly_nested_json_is_skipped(nested: str) -> None:
    builder = EvidenceBuilder()
    read_memory_log(builder, BytesIO(nested.encode()), "policy-0")
    read_ledger(builder, BytesIO(nested.encode()))
    assert not read_document(builder, nested, "oom")
    assert builder.build().failure is None


# --- size ---


@pytest.mark.parametrize(
    ("start", "repeated"),
    [
        ("", "gpu memory "),
        ("RuntimeError: out of memory ", "1234567890"),
        ("", "alloc 1 "),
        ("Tried to allocate 2.00 GiB. ", "load_"),
        ("", "need 12 GiB have "),
        ("out of memory ", "mem: 12 "),
        ('  File "x.py", line 3, in ', "memory "),
    ],
)
def test_a_long_line_of_equal_words_is_read_quickly(start: str, repeated: str) -> None:
    """A quadratic pattern took 10 to 100 s of the first five lines; all of them now take less than 0.3 s."""
    line = start + repeated * (((1 << 16) - len(start)) // len(repeated) - 1)
    began = process_time()
    evidence_of(f"{line}\n")
    assert process_time() - began < 4.0


_READER = """
import resource, sys
from pathlib import Path
from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import read_evidence
[best, *_] = diagnose(read_evidence(Path("-")))
print(best.failure_class, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def long_log(size_bytes: int) -> Iterator[bytes]:
    """Log of weeks: a line of metrics per step, including memory, and a failure at the end."""
    metrics = b" - ".join(b"actor/metric_%d: 0.0214" % number for number in range(60))
    steps = b"".join(b"(WorkerDict pid=%d) step:%d - %s\n" % (n % 64, n, metrics) for n in range(200))
    memory = b"(WorkerDict pid=7) After update, memory allocated (GB): 3.75, memory reserved (GB): 40.25\n" * 20
    for _ in range(size_bytes // len(steps + memory)):
        yield steps + memory
    yield next(text for path, text in TEXTS.items() if path.parent.name == "Fragmentation")


def test_50_megabytes_through_a_pipe_take_no_more_memory_than_two() -> None:
    """Runs in a process of its own, which the kernel limits to 1 GiB of address space and 20 s of CPU time."""

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    def peak(size_bytes: int) -> int:
        reader = subprocess.Popen(
            [sys.executable, "-c", _READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=limits
        )
        assert reader.stdin is not None
        for block in long_log(size_bytes):
            reader.stdin.write(block)
        output, _ = reader.communicate()
        failure_class, peak_bytes = output.decode().split()
        assert failure_class == "Fragmentation"
        return int(peak_bytes)

    assert peak(50 * MIB) < peak(2 * MIB) + 8 * MIB
