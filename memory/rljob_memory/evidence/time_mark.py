"""Lines that the trainer's processes put into their logs, so that what libraries print without a time can be dated."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_MARK = re.compile(r"^rljob (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z ")


def time_mark(time: datetime, what: str) -> str:
    """The line, for `time` in any zone. What follows it in the log happened at that time or later."""
    return f"rljob {time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z {what}"


def marked_time(text: str) -> float | None:
    """Seconds since the epoch, where `text` is such a line."""
    match = _MARK.match(text)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(match[1]).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
