"""Environment variables of a pod, as the operator sets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.memory_plan import MemoryPlan

HOSTS = {
    "RLJOB_RAY_HEAD": "digits-controller.train.svc:6379",
    "POD_IP": "10.244.1.7",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef",
}


def write_settings(directory: Path, attempt: int = 3, plan: MemoryPlan | None = None, **fields: Any) -> None:
    """Refresh the volume with the settings of an attempt."""
    settings = AttemptSettings(attempt=attempt, memory_plan=plan, **fields)
    (directory / "attempt.json").write_text(settings.model_dump_json(by_alias=True, exclude_none=True))


def pod_variables(directory: Path, **changes: str) -> dict[str, str]:
    """Variables of the pod of the only worker, with files in `directory`."""
    return {
        "RLJOB_NAME": "digits",
        "RLJOB_NAMESPACE": "train",
        "RLJOB_ATTEMPT": "3",
        "RLJOB_PLAN_GENERATION": "1",
        "RLJOB_ATTEMPT_SETTINGS": str(directory / "attempt.json"),
        "RLJOB_ROLE": "policy",
        "RLJOB_INDEX": "0",
        "RLJOB_WORKERS": "1",
        "RLJOB_MANIFEST": str(directory / "job.yaml"),
        "RLJOB_OUTPUT": str(directory / "volume"),
        "RLJOB_RUN_DIR": str(directory / "run"),
        "RLJOB_TERMINATION_LOG": str(directory / "termination-log"),
        **HOSTS,
        **changes,
    }
