"""The user's own Python functions: `module:function`, importable from the manifest's directory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljob_trainer.errors import BadInput


def load_function(reference: str, directory: Path) -> Callable[..., Any]:
    """The function that `reference` ("module:function") names. Modules in `directory` come first.

    `directory` stays on the import path, since the function may import its neighbours when it is called.
    """
    module_name, _, function_name = reference.partition(":")
    path = str(directory.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        raise BadInput(
            f"cannot import {module_name} for {reference}: {type(error).__name__}: {error}; "
            f"expected {module_name.replace('.', '/')}.py in {directory} or an installed module"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BadInput(f"expected a function {function_name} in {module.__file__}, found none")
    return function  # type: ignore[no-any-return]
