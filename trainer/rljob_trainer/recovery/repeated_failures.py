"""Failures that a restart has met again: they are input errors, however often the job may restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rljob_client.errors import BadInput, RunError
from rljob_client.run_directory.durable_files import write_atomically


def require_new_failure(failure: RunError, record: Path, step: int) -> None:
    """Record the exception of a role, and raise `BadInput` if the attempt before has recorded the same one.

    Two are the same if they have the same type, in the same call of the same role at the same uncommitted `step`. Other
    failures, which may pass, are not compared. `record`: a file that survives the attempt, in pods as well.
    """
    if failure.raised is None or isinstance(failure, BadInput):
        return
    role = (failure.actor or "").partition("-")[0]
    place = {"raised": failure.raised, "role": role, "step": step}
    before = _recorded(record)
    if {name: before.get(name) for name in place} != place:
        write_atomically(record, json.dumps(place | {"message": str(failure)}).encode())
        return
    repeated = BadInput(
        f"{before.get('message', failure)}; a restart failed in the same way at step {step}: change the model, the "
        "data or the settings"
    )
    repeated.actor = failure.actor
    raise repeated from failure


def _recorded(record: Path) -> dict[str, Any]:
    try:
        found = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
