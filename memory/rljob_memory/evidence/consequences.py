"""Lines beside the failures of memory: consequences of a failure elsewhere, which are counted, and other reasons for a
vague one, which rule memory out."""

from __future__ import annotations

import re

from rljob_memory.evidence.signatures import CORRUPT_SIZE

CRASH = "crash"
"""A process ended itself by a signal: no killer was involved."""
REFUSED = "access to /dev/shm refused"
DEVICE_ASSERT = "an index out of range, after which every call to the GPU fails"
OTHER_KILLER = "killed for another reason than memory"
CLEAN_UP = "an engine that kills its own processes after an error"

_OTHER_REASONS: tuple[tuple[str, str], ...] = (
    (REFUSED, r"(?:shm_open|shared memory|/dev/shm).{0,120}: (?:Permission denied|Operation not permitted)"),
    (REFUSED, r"shm\w{0,6}\.cc:\d+ NCCL WARN Cuda failure (?:\d+ )?'(?!out of memory)"),
    (
        DEVICE_ASSERT,
        r"device-side assert|IndexError: index out of range in self|Assertion `\w+ \w{2,12} <|srcSelectDimSize",
    ),
    # The kubelet and Docker name the kernel's kill, if it was one, in these fields.
    (OTHER_KILLER, r"\bReason\W{1,4}\s*Error\b|\"reason\": ?\"Error\"|\"OOMKilled\": ?false"),
    (
        OTHER_KILLER,
        r"failed liveness probe|\bSpot interruption\b|\bDUE TO (?:PREEMPTION|TIME LIMIT|NODE FAILURE)\b"
        r"|\b(?:instance|node|pod|VM|vm|job|worker|container) (?:(?:was|is|has|been) ){0,2}preempted\b",
    ),
    # The parent ends itself by SIGKILL too: `kill_process_tree` of vLLM and of SGLang.
    (CLEAN_UP, r"Got fatal signal from worker processes, shutting down|Received sigquit from a child process"),
)
_OTHER_REASON_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _OTHER_REASONS)

_SECONDARY: tuple[tuple[str, str], ...] = (
    ("NCCL watchdog timeout", r"Watchdog caught collective operation timeout|Timeout at NCCL work|NCCL timeout"),
    ("corrupt size after a timeout", re.escape(CORRUPT_SIZE)),
    ("actor died", r"ActorDiedError|RayActorError|The actor died unexpectedly|WorkerCrashedError"),
    ("engine died", r"EngineDeadError|EngineCore_?\S* died unexpectedly|EngineCore encountered a fatal error"),
    ("connection lost", r"Broken ?pipe|Connection (?:reset|closed) by (?:remote )?peer|Socket recv failed"),
    ("launcher report", r"ChildFailedError|Sending process \d+ closing signal SIGTERM|Signal 15 \(SIGTERM\)"),
    (
        CRASH,
        r"\*\*\* SIG(?:SEGV|ABRT|FPE|ILL) received|Fatal Python error: (?!Bus)|\bSegmentation fault\b(?! or)"
        r"|exitcode\s*[:=] -(?:4|6|8|11)\b|Signal (?:4|6|8|11) \(SIG|died with <Signals\.SIG(?:SEGV|ABRT|FPE|ILL)",
    ),
    ("NCCL abort", r"NCCL communicator was aborted|ncclRemoteError|Process group watchdog thread terminated"),
)
_SECONDARY_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _SECONDARY)


def other_reason(text: str) -> str | None:
    """`REFUSED` or `OTHER_KILLER` if the line shows a reason for a vague failure that is not memory."""
    return next((name for name, pattern in _OTHER_REASON_PATTERNS if pattern.search(text)), None)


def secondary_name(text: str) -> str | None:
    """The name of a consequence of a failure elsewhere; None if the text is not one."""
    for name, pattern in _SECONDARY_PATTERNS:
        if pattern.search(text):
            return name
    return None
