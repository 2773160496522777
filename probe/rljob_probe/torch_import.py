"""Waits for torch to be imported, whoever imports it. Never imports it, and has no part in its import."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Callable

    Then = Callable[[ModuleType], None]


def when_torch_is_there(then: Then) -> None:
    """Calls `then` with torch once its part for CUDA is imported. What goes wrong in `then` is lost."""
    sys.meta_path.insert(0, _Lookout(then))


class _Lookout:
    """Asked first for every module, finds none, and looks each time whether torch.cuda is there: torch itself imports
    many modules after that one. A loader of its own would show in the tracebacks and warnings of torch's import."""

    def __init__(self, then: Then) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None and not getattr(cuda.__spec__, "_initializing", False):
            self._call()
        return None

    def _call(self) -> None:
        try:
            sys.meta_path.remove(self)
            self._then(sys.modules["torch"])
        except Exception:
            pass
