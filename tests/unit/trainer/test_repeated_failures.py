"""An exception that a restart meets again at the same step ends the job; failures that may pass do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from rljob_client.errors import BadInput, RunError
from rljob_trainer.errors import WorkerLost
from rljob_trainer.recovery.repeated_failures import require_new_failure
from rljob_trainer.roles.calls import result_of


def raised(kind: str = "IndexError while generating", actor: str = "rollout-0", said: str = "first") -> RunError:
    failure = RunError(f"{actor} failed while generating: {said}").of(actor)
    failure.raised = kind
    return failure


@pytest.mark.parametrize(
    ("first", "second", "step", "repeats"),
    [
        (raised(), raised(said="other words"), 4, True),
        (raised(), raised(actor="rollout-1"), 4, True),
        (raised(), raised(), 5, False),
        (raised(), raised("ValueError while generating"), 4, False),
        (raised(), raised(actor="policy-0"), 4, False),
        (WorkerLost("died"), WorkerLost("died"), 4, False),
        (RunError("CUDA error"), RunError("CUDA error"), 4, False),
    ],
)
def test_the_same_exception_at_the_same_step_is_not_restarted_again(
    tmp_path: Path, first: RunError, second: RunError, step: int, repeats: bool
) -> None:
    record = tmp_path / "failure.json"
    require_new_failure(first, record, 4)
    if not repeats:
        require_new_failure(second, record, step)
        return
    with pytest.raises(BadInput, match="generating: first; a restart failed in the same way at step 4") as refused:
        require_new_failure(second, record, step)
    assert refused.value.actor == second.actor


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    record = tmp_path / "failure.json"
    record.write_bytes(b"[1")
    require_new_failure(raised(), record, 4)
    with pytest.raises(BadInput):
        require_new_failure(raised(), record, 4)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (IndexError("out of range"), "IndexError while generating"),
        (RuntimeError("head_dim=16"), "RuntimeError while generating: head_dim=16"),
        (RuntimeError("CUDA error"), None),
    ],
)
def test_the_exception_of_a_role_names_its_type_and_call(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, expected: str | None
) -> None:
    monkeypatch.setattr(ray, "get", failing_with(cause))
    with pytest.raises(RunError) as failed:
        result_of("reference", "rollout-0", "generating")
    assert failed.value.raised == expected


def test_a_refused_model_is_named_with_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = BadInput("ValueError: no; change them").of("rollout-0")
    refused.raised = "ValueError"
    monkeypatch.setattr(ray, "get", failing_with(refused))
    with pytest.raises(BadInput, match=r"^rollout-0 failed while starting: ValueError: no; change them$"):
        result_of("reference", "rollout-0", "starting")


def failing_with(cause: Exception) -> Any:
    def get(_reference: object) -> object:
        raise RayTaskError("call", "traceback", cause)

    return get
