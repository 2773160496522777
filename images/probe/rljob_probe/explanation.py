"""The termination message of a program that ran out of memory, written once by a process that knows the cause."""

from __future__ import annotations

import fcntl
import json
import os
from types import FrameType
from typing import Any, NamedTuple

from rljob_probe import cgroup, circumstances, notes
from rljob_probe.account import account, places_of_frames, places_of_traceback
from rljob_probe.failure import DEVICE, HOST, SHARED, is_of_another_process, memory_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rljob_probe.account import Place

_WHICH_MEMORY = {DEVICE: "GPU memory", HOST: "host memory", SHARED: "shared memory (/dev/shm)"}
_LONGEST_ERROR, _LONGEST_LINE = 1400, 400
"""Characters of an error, and of the line about it."""


class Explanation(NamedTuple):
    """Explanation of an out-of-memory failure."""

    exit_code: int
    """DEVICE, HOST or SHARED: the memory that ran out. The process keeps its own exit code."""
    message: str
    """Summary as text."""
    evidence: dict[str, Any]
    """`rljob_api.step_report.Evidence`, with its JSON names."""


def report_exit(log: str, error: BaseException | None, *, first: bool, kills: int) -> None:
    """Write the termination message if memory caused the exit of this process.

    `error`: the exception that ended the process, if any. `first`: True in the process that started all others of the
    program; it also reports for processes that could not. `kills`: processes that the kernel killed since the start.
    """
    brought = _of_others_note() if first and is_of_another_process(error) else None
    explanation = brought or _of_error(error) or _of_own_note()
    if explanation is None and first:
        explanation = _of_others_note() or _of_kills(kills)
    if explanation is not None:
        write_message(log, explanation.exit_code, explanation.message, explanation.evidence)


def save_note(error: BaseException, caller: FrameType | None, torch: Any) -> bool:
    """Save a note about an error that `caller` is about to receive; False if it does not mean that GPU memory ran
    out."""
    failure = memory_failure(error)
    if failure is None or failure.exit_code != DEVICE:
        return False
    places = [*places_of_traceback(failure.error.__traceback__), *places_of_frames(caller)]
    notes.save({**_evidence_at(places, torch), "message": failure.text[:_LONGEST_ERROR]})
    return True


def _of_error(error: BaseException | None) -> Explanation | None:
    failure = memory_failure(error)
    if failure is None:
        return None
    noted = notes.own() if failure.exit_code == DEVICE else None
    evidence = noted or _evidence_at(places_of_traceback(failure.error.__traceback__))
    evidence = {**evidence, "message": failure.text[:_LONGEST_ERROR]}
    return explanation_of(failure.exit_code, evidence)


def _of_own_note() -> Explanation | None:
    """Explain the exit of a process that caught the error, and has completed no step since then."""
    note = notes.own()
    if note is None:
        return None
    if circumstances.current_step() > note["step"]:
        notes.discard()
        return None
    return explanation_of(DEVICE, note)


def _of_others_note() -> Explanation | None:
    note = notes.earliest_of_others()
    return explanation_of(DEVICE, note) if note is not None else None


def _of_kills(kills: int) -> Explanation | None:
    if kills <= 0:
        return None
    limit = cgroup.memory_limit_bytes()
    at_limit = f" at its memory limit of {limit / (1 << 20):.0f} MiB" if limit is not None else ""
    message = f"OOMKilled: the kernel killed {kills} process(es) of the container{at_limit}"
    return explanation_of(HOST, {**_circumstances(), "message": message})


def _evidence_at(places: list[Place], torch: Any = None) -> dict[str, Any]:
    """Evidence without a message, of an error in `places`, the innermost first. `torch`: as in `account`."""
    phase = circumstances.phase_of(file for file, _, _ in places)
    return {**_circumstances(), **({"phase": phase} if phase else {}), "failure": account(places, torch)}


def _circumstances() -> dict[str, Any]:
    place = circumstances.place()
    memory = {"role": place["role"], "rank": place["rank"], "peakRssBytes": circumstances.peak_rss_bytes()}
    return {
        "time": circumstances.timestamp(),
        **place,
        "step": circumstances.current_step(),
        "memory": memory,
    }


def explanation_of(exit_code: int, evidence: dict[str, Any]) -> Explanation:
    """Explanation with a message made from the evidence."""
    first_line = evidence["message"].partition("\n")[0][:_LONGEST_LINE]
    failure = f"rank {evidence['rank']} ran out of {_WHICH_MEMORY[exit_code]} in step {evidence['step']}"
    return Explanation(exit_code, f"{failure}: {first_line}", evidence)


# The termination message: one JSON object of at most 4,096 bytes, as `rljob_api.termination_message` reads it.

MAX_MESSAGE_BYTES = 4096


def write_message(log: str, exit_code: int, message: str, evidence: dict[str, Any]) -> None:
    """Write the termination message if the log is empty. An earlier message of the program or its processes is kept."""
    content = encoded(exit_code, message, evidence)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_size == 0:
            os.write(descriptor, content)
    except BlockingIOError:
        pass  # another process is writing: it was first
    finally:
        os.close(descriptor)


def encoded(exit_code: int, message: str, evidence: dict[str, Any]) -> bytes:
    """JSON of the termination message. The samples are left out, and the evidence's message is cut, as needed."""
    text = evidence["message"]
    while True:
        document = {"exitCode": exit_code, "message": message, "evidence": {**evidence, "message": text}}
        content = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        excess_bytes = len(content) - MAX_MESSAGE_BYTES
        if excess_bytes <= 0 or not text:
            return content
        if evidence.get("failure", {}).get("samples"):
            evidence = {**evidence, "failure": {**evidence["failure"], "samples": []}}
            continue
        text = text[: max(len(text) - excess_bytes, 0)]
