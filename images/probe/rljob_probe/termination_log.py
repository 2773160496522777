"""The termination message: one JSON object of at most 4,096 bytes, as `rljob_api.termination_message` reads it."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

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
    """JSON of the termination message. The evidence's message is truncated as needed."""
    words = evidence["message"]
    while True:
        document = {"exitCode": exit_code, "message": message, "evidence": {**evidence, "message": words}}
        text = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        excess_bytes = len(text) - MAX_MESSAGE_BYTES
        if excess_bytes <= 0 or not words:
            return text
        words = words[: max(len(words) - excess_bytes, 0)]
