"""Notes of vLLM engines that lack the memory to start: their process logs the error, and its parent gets another."""

from __future__ import annotations

import functools
import sys

from rljob_probe import notes
from rljob_probe.patching import after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

CHECKS = {
    "vllm.v1.worker.utils": "request_memory",
    "vllm.v1.core.kv_cache_utils": "_check_enough_kv_cache_memory",
}
"""Functions that raise the errors, by module."""


def watch_engine_start() -> None:
    """Watch the checks as soon as vLLM is imported. A version without one of them is not watched."""
    for module in CHECKS:
        after_import(module, _watch)


def _watch(module: ModuleType) -> None:
    name = CHECKS[module.__name__]
    check = getattr(module, name, None)
    if check is None:
        return
    refused = False

    @functools.wraps(check)
    def watched(*given: Any, **named: Any) -> Any:
        nonlocal refused
        try:
            found = check(*given, **named)
        except Exception as error:
            refused = _save_note(error)
            raise
        if refused:  # the program has tried again with other settings
            refused = False
            _discard_note()
        return found

    setattr(module, name, watched)


def _save_note(error: Exception) -> bool:
    """True if the error has a note."""
    try:
        from rljob_probe.explanation import save_note

        return save_note(error, sys._getframe(2), sys.modules.get("torch"))
    except Exception:
        return False  # vLLM's own error is on its way


def _discard_note() -> None:
    try:
        notes.discard()
    except OSError:
        pass
