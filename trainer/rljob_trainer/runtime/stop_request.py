"""Stop on SIGTERM or SIGINT: after the current step; at once during start-up, and on a second signal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rljob_api.exit_codes import ExitCode

_EXIT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class StopNow(KeyboardInterrupt):
    """Raised in the main thread to stop at once. The step in progress is not committed.

    A wait in Ray is only ended by a KeyboardInterrupt, and then raises one of its own: catch KeyboardInterrupt.
    """


class StopRequest:
    """True once a signal has requested a stop."""

    def __init__(self, on_request: Callable[[str], None]) -> None:
        self._on_request = on_request
        self.exit_code: ExitCode | None = None
        """Exit code of the first signal; None until then."""
        self._at_once = False

    def __bool__(self) -> bool:
        return self.exit_code is not None

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within the block, until `after_step` is called, a signal raises `StopNow`: there is no step to finish."""
        if self:
            raise StopNow
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def after_step(self) -> None:
        """Let the current step finish from now on."""
        self._at_once = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal. Raises `StopNow` for the second one, and within `at_once`."""
        received = signal.Signals(number)
        if self.exit_code is not None:
            raise StopNow
        self.exit_code = _EXIT_CODES[received]
        if self._at_once:
            self._on_request(f"{received.name}: stopping")
            raise StopNow
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
