"""Import hook that waits for the program to import torch. It never imports torch and does not affect the import."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Callable

    Then = Callable[[ModuleType], None]


def when_torch_is_imported(then: Then) -> None:
    """Call `then` with torch as soon as torch.cuda is imported. Exceptions of `then` are ignored."""
    sys.meta_path.insert(0, _ImportWatcher(then))


class _ImportWatcher:
    """First finder on sys.meta_path. It finds no module, but checks at each import whether torch.cuda is loaded: torch
    imports many modules after that one. A loader would appear in tracebacks and warnings of torch's import.

    It stays on sys.meta_path: importlib iterates over that list during the import that calls it, and a finder that
    removes itself would hide the next one."""

    def __init__(self, then: Then) -> None:
        self._then: Then | None = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self._then is None:
            return None
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None and not getattr(cuda.__spec__, "_initializing", False):
            then, self._then = self._then, None
            self._call(then)
        return None

    def _call(self, then: Then) -> None:
        try:
            then(sys.modules["torch"])
        except Exception:
            pass
