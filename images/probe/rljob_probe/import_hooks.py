"""Import hooks: run a function once the program has imported a module."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Callable, Sequence

    Then = Callable[[ModuleType], None]


# Import hook that waits for the program to import torch. It never imports torch and does not affect the import.


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


# Runs a function on a module right after it was imported, before any other code can use it.


def after_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch` with the module `name` when it is imported; at once if it is already."""
    module = sys.modules.get(name)
    if module is not None:
        patch(module)
    else:
        sys.meta_path.insert(0, _Finder(name, patch))


class _Finder:
    """Finds the module by the other finders, and lets its loader call `patch` at the end."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)  # finders for Python 3.3 and older have none
            spec: ModuleSpec | None = None if finder is self or find_spec is None else find_spec(name, path, target)
            if spec is not None and hasattr(spec.loader, "exec_module"):
                _extend(spec.loader, self._patch)
            if spec is not None:
                return spec
        return None


def _extend(loader: Any, patch: Callable[[ModuleType], None]) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        patch(module)

    loader.exec_module = exec_module
