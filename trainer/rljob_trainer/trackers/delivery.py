"""Calls a tracker from a thread of its own: the run never waits for it, and never fails because of it."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from rljob_api.environment import is_secret_name
from rljob_trainer.trackers.tracker import CLOSE_SECONDS, Tracker

log = structlog.get_logger()

Call = Callable[[Tracker], None]

MOST_WAITING = 1000
"""Calls that wait for a tracker; a step makes one to three."""

HANGS_AFTER_SECONDS = 120.0
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=[?&])[^=&\s]*(?:token|key|secret|password)[^=&\s]*=[^&\s'\"]+", re.I)
_SHORTEST_SECRET = 6


class Delivery:
    """Opens a tracker and passes calls to it, in their order. Call `close` at the end."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        warn: Callable[[str], None],
        environment: Mapping[str, str],
    ) -> None:
        """`warn`: displays a warning, from any thread; it is called once at most. `environment`: its secrets are not
        printed."""
        self._name = name
        self._show = warn
        self._secrets = [value for key, value in environment.items() if is_secret_name(key)]
        self._calls: queue.Queue[Call | None] = queue.Queue(MOST_WAITING)
        self._called_at: float | None = time.monotonic()
        self._is_usable = True
        self._has_warned = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(open_tracker,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        """Add a call. If too many wait, it is dropped."""
        if not self._is_usable:
            return
        called_at = self._called_at
        if called_at is not None and time.monotonic() - called_at > HANGS_AFTER_SECONDS:
            self._warn(f"has not answered for {HANGS_AFTER_SECONDS:.0f} s")
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._warn(f"is too slow: more than {MOST_WAITING} calls wait, and later ones are lost")

    def close(self, deadline: float) -> None:
        """Wait until all calls are made, until `deadline` on the monotonic clock at most."""
        with suppress(queue.Full):
            self._calls.put(None, timeout=max(deadline - time.monotonic(), 0.0))
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._warn(f"did not finish within {CLOSE_SECONDS:.0f} s: its last values may be missing")

    def _run(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            tracker = open_tracker()
        except (Exception, SystemExit) as error:  # some libraries exit if nobody can log in
            self._is_usable = False
            self._failed(error)
            return
        while True:
            self._called_at = None
            call = self._calls.get()
            if call is None:
                return
            self._called_at = time.monotonic()
            try:
                call(tracker)
            except (Exception, SystemExit) as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        message = " ".join(str(error).split())
        # Without a traceback: it quotes the library's arguments.
        self._warn(f"failed: {type(error).__name__}: {message}"[:600])

    def _warn(self, what: str) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        text = f"the tracker {self._name} {self._without_secrets(what).rstrip('. ')}; training continues"
        log.warning(text)
        self._show(text)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, "***")
        return _IN_URL.sub("***", text)
