"""The rewards of several functions, from the score of a step to its journal and its metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rljob_client.run_directory.ledger import Ledger
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.tasks.rewards import Reward
from tests.unit.trainer.test_controller_recovers import ECHO, STEPS, Measured, ResumedJob

IDS = frozenset({"completion_ids"})
ODD = Reward("odd", lambda completion_ids: 1.0 if sum(completion_ids) % 2 else None, IDS, label="odd", weight=0.5)
NONE = Reward("none", lambda completion_ids: None, IDS, label="none")


def test_each_function_is_journaled_and_is_a_metric_of_the_step(tmp_path: Path) -> None:
    ResumedJob(tmp_path, functions=[ECHO, ODD, NONE], every_steps=100).attempt(Measured([]))
    batch = RolloutJournal(tmp_path / "journal").find(STEPS - 1)
    assert batch is not None
    echo, odd = batch.reward_parts["echo"], batch.reward_parts["odd"]
    assert batch.rewards == pytest.approx(echo + 0.5 * np.nan_to_num(odd))
    assert list(batch.reward_parts) == ["echo", "odd", "none"]
    assert np.isnan(batch.reward_parts["none"]).all()
    assert len(batch.kept) == 0
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        metrics = ledger.steps[STEPS - 2].metrics
    assert metrics.get("rewards/odd", 1.0) == 1.0
    assert metrics["rewards/echo"] == pytest.approx(echo.mean())
    assert "rewards/none" not in metrics


def test_responses_that_all_functions_leave_out_are_not_kept(tmp_path: Path) -> None:
    ResumedJob(tmp_path, functions=[ODD], every_steps=100).attempt(Measured([]))
    batch = RolloutJournal(tmp_path / "journal").find(1)
    assert batch is not None
    odd = np.asarray([sum(ids) % 2 == 1 for ids in batch.response_ids])
    assert 0 < odd.sum() < len(odd)
    assert batch.reward_parts == {}
    assert (batch.kept if len(batch.kept) else np.ones_like(odd)).tolist() == odd.tolist()
