"""Stop on SIGTERM or SIGINT: after the current step, or at once on a second signal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rljob_api.exit_codes import ExitCode

_EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class StopNow(BaseException):
    """Raised in the main thread on the second signal. The step in progress is not committed."""


class StopRequest:
    """True once a signal has requested a stop."""

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self._on_request = on_request
        self.exit_code: ExitCode | None = None
        """Of the first signal; None until then."""

    def __bool__(self) -> bool:
        return self.exit_code is not None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self.exit_code is not None:
            raise StopNow
        self.exit_code = _EXIT_CODES[received]
        self._on_request(f"{received.name}: stopping after this step (a second signal stops at once)")


@contextmanager
def stop_on_signals(on_request: Callable[[str], None]) -> Iterator[StopRequest]:
    """Handle signals within the block. `on_request`: displays the message."""
    request = StopRequest(on_request)
    before = {number: signal.signal(number, request.handle) for number in _EXIT_CODES}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
