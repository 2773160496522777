"""Imports the Python modules of a task from the directory of its manifest, which shadow no other module.

Only what no installed package and no part of the standard library provides is imported from there. Otherwise an
unrelated `numbers.py` or `datasets/` next to the manifest would replace a module that libraries import.
A module may limit the staleness of its rollouts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput
from rljob_trainer.tasks.user_code import error_text, is_stop, short_repr, user_code


class _ManifestDirectory(MetaPathFinder):
    """Finds the modules of one directory. The last finder, it is asked for what no other finder has found."""

    def __init__(self, directory: Path, named: str) -> None:
        """`named`: the package or module that the manifest names."""
        self.directory, self.named = directory, named

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:
            return None
        spec = PathFinder.find_spec(fullname, [str(self.directory)])
        if spec is None or spec.origin is not None:
            return spec
        # A folder without __init__.py is a package only if it has code: wandb/ and datasets/ are often folders of data.
        return spec if fullname == self.named or any((self.directory / fullname).glob("*.py")) else None


def load_module(reference: str, directory: Path) -> ModuleType:
    """The module of `reference` ("module:function"), from `directory` or an installed package.

    Its own imports are looked for in `directory` last, now and later. Raises `BadInput` if the module cannot be
    imported, or exists both in `directory` and elsewhere.
    """
    name = reference.partition(":")[0]
    finder = _ManifestDirectory(directory.resolve(), name.partition(".")[0])
    sys.meta_path[:] = [other for other in sys.meta_path if not isinstance(other, _ManifestDirectory)]
    importlib.invalidate_caches()
    _require_one(finder.named, finder)
    sys.meta_path.append(finder)
    try:
        return importlib.import_module(name)
    except BaseException as error:
        if is_stop(error):
            raise
        raise BadInput(f"cannot import {name} for {reference}: {_cause(error, name, directory)}") from error


def _require_one(package: str, finder: _ManifestDirectory) -> None:
    """Raise `BadInput` if both `finder` and the other finders find the package. Forget one of another directory."""
    own = finder.find_spec(package, None)
    if own is None:
        return
    finders = (getattr(other, "find_spec", None) for other in sys.meta_path)
    specs = (find(package, None) for find in finders if find is not None)
    other = next((spec for spec in specs if spec is not None), None)
    if other is not None and own.origin is None:
        return  # a folder without __init__.py, which Python ignores if it finds anything else
    if other is not None and not _is_same_file(own, other):
        raise BadInput(
            f"expected one module {package}, found {_location(own)} and {_location(other)}, which other modules "
            f"import; rename {_location(own)}, and write its new name in the manifest"
        )
    known = sys.modules.get(package)
    if known is not None and not (known.__spec__ and _is_same_file(own, known.__spec__)):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def _location(spec: ModuleSpec) -> str:
    return spec.origin or next(iter(spec.submodule_search_locations or ()), spec.name)


def _is_same_file(one: ModuleSpec, other: ModuleSpec) -> bool:
    return Path(_location(one)).resolve() == Path(_location(other)).resolve()


def _cause(error: BaseException, name: str, directory: Path) -> str:
    found = error_text(error).removeprefix("raised ")
    if isinstance(error, SystemExit):
        return f"it {found}; put what it runs as a program under if __name__ == '__main__':"
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or name).replace(".", "/")
        return f"{found}; expected {missing}.py in {directory} or an installed module"
    other = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    imported = other.__name__ if isinstance(other, ModuleType) else getattr(error, "name", None)
    if isinstance(error, ImportError | AttributeError) and imported:
        own_file = directory / f"{imported.partition('.')[0]}.py"
        used = getattr(sys.modules.get(imported), "__file__", None)
        if own_file.is_file() and used != str(own_file.resolve()):
            return f"{found}; {imported} is {used or 'built into Python'}, not {own_file}: rename that file"
    return f"{found}; correct that module"


_LIMIT = "MAX_STALENESS"


def require_staleness_allowed(spec: RLJobSpec, directory: Path) -> None:
    """Raise `BadInput` if a module of `task.name` or of a reward has a MAX_STALENESS below `algorithm.maxStaleness`.

    Modules may be in `directory`. Without stale rollouts, none is imported.
    """
    requested = spec.algorithm.max_staleness
    if requested == 0:
        return
    rewards = [("task.rewards" if spec.task.rewards else "task.reward", r.source) for r in spec.task.reward_functions]
    for field, reference in [("task.name", spec.task.name), *rewards]:
        if ":" not in reference:  # built-in
            continue
        module = load_module(reference, directory)
        with user_code(f"the module {module.__name__}"):
            limit = getattr(module, _LIMIT, None)
        if limit is None:
            continue
        module_name = reference.partition(":")[0]
        if type(limit) is not int or limit < 0:
            raise BadInput(
                f"{field}: expected {_LIMIT} in {module_name} to be a whole number from 0, found {short_repr(limit)}; "
                f"write {_LIMIT} = 0 to refuse stale rollouts, or remove it"
            )
        if requested > limit:
            partial = ", partialRolloutPrompts: 0" if spec.algorithm.partial_rollout_prompts else ""
            raise BadInput(
                f"algorithm.maxStaleness: expected at most {limit}, because {module_name} ({field}) sets "
                f"{_LIMIT} = {limit}, found {requested}; write algorithm: {{maxStaleness: {limit}{partial}}}, "
                "or change the task"
            )
