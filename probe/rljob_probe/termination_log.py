"""The termination message: one JSON object of at most 4,096 bytes, as `rljob_api.termination_message` reads it."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

MAX_MESSAGE_BYTES = 4096


def tell(log: str, exit_code: int, sentence: str, evidence: dict[str, Any]) -> None:
    """Writes it where the log is empty. What the program itself or another of its processes wrote first stays."""
    message = encoded(exit_code, sentence, evidence)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_size == 0:
            os.write(descriptor, message)
    except BlockingIOError:
        pass  # another process is writing: it was first
    finally:
        os.close(descriptor)


def encoded(exit_code: int, sentence: str, evidence: dict[str, Any]) -> bytes:
    """The evidence's message is cut as far as needed."""
    words = evidence["message"]
    while True:
        document = {"exitCode": exit_code, "message": sentence, "evidence": {**evidence, "message": words}}
        text = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        excess_bytes = len(text) - MAX_MESSAGE_BYTES
        if excess_bytes <= 0 or not words:
            return text
        words = words[: max(len(words) - excess_bytes, 0)]
