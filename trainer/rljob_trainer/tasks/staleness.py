"""The limit that a task's Python modules may set on the staleness of its rollouts."""

from __future__ import annotations

from pathlib import Path

from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput
from rljob_trainer.tasks.task_modules import load_module
from rljob_trainer.tasks.user_code import shown, user_code

_LIMIT = "MAX_STALENESS"


def require_staleness_allowed(spec: RLJobSpec, directory: Path) -> None:
    """Raise `BadInput` if a module of `task.name` or `task.reward` has a MAX_STALENESS below `algorithm.maxStaleness`.

    Modules may be in `directory`. Without stale rollouts, none is imported.
    """
    requested = spec.algorithm.max_staleness
    if requested == 0:
        return
    for field, reference in (("task.name", spec.task.name), ("task.reward", spec.task.reward)):
        if reference is None or ":" not in reference:  # built-in
            continue
        module = load_module(reference, directory)
        with user_code(f"the module {module.__name__}"):
            limit = getattr(module, _LIMIT, None)
        if limit is None:
            continue
        module_name = reference.partition(":")[0]
        if type(limit) is not int or limit < 0:
            raise BadInput(
                f"{field}: expected {_LIMIT} in {module_name} to be a whole number from 0, found {shown(limit)}; "
                f"write {_LIMIT} = 0 to refuse stale rollouts, or remove it"
            )
        if requested > limit:
            partial = ", partialRolloutPrompts: 0" if spec.algorithm.partial_rollout_prompts else ""
            raise BadInput(
                f"algorithm.maxStaleness: expected at most {limit}, because {module_name} ({field}) sets "
                f"{_LIMIT} = {limit}, found {requested}; write algorithm: {{maxStaleness: {limit}{partial}}}, "
                "or change the task"
            )
