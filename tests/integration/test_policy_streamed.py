"""An update whose parts are added while others are generated: the same bits as in one call, and the gradient of the
whole step up to rounding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rljob_trainer.policy.rank import PolicyRank
from rljob_trainer.rollout_batch import RolloutBatch
from tests.integration.policy_processes import (
    ALL_TERMS,
    RankProcesses,
    parameters,
    policy_processes,
    scored_batch,
    state_of,
    tiny_config,
)
from tests.integration.test_policy_ranks_recover import (
    FAILING_RANK,
    between_micro_batches,
    in_first_backward,
    inject,
)

GROUPS, GROUP_SIZE = 6, 3
PARTS = [1, 0, 2, 0, 1, 2]
"""The part of each group."""
WITHOUT_GRADIENT: dict[int, tuple[int, ...]] = {1: (), 2: (1, 3), 3: (2, 5), 4: tuple(range(GROUPS))}
"""Groups whose advantages are 0, by step: none, all of the first part, all of the last part, all."""
SETTINGS: dict[str, dict[str, Any]] = {
    "TokenMean": {"learning_rate": 1e-3},
    "ConstantLength": {"name": "dr_grpo", "learning_rate": 1e-3, "max_response_tokens": 14},
    "all terms": ALL_TERMS | {"learning_rate": 1e-3},
}


def step_in_parts(step: int) -> RolloutBatch:
    batch = scored_batch(step, prompts=GROUPS, group_size=GROUP_SIZE)
    advantages = batch.advantages.reshape(GROUPS, GROUP_SIZE).copy()
    advantages[list(WITHOUT_GRADIENT[step])] = 0
    return replace(batch, advantages=advantages.reshape(-1), parts=np.array(PARTS, np.int32))


def part_of(batch: RolloutBatch, part: int) -> RolloutBatch:
    """The groups of one part, as the controller sends them: without the others."""
    groups = np.flatnonzero(batch.parts == part).tolist()
    members = [group * GROUP_SIZE + member for group in groups for member in range(GROUP_SIZE)]
    return replace(
        batch,
        prompt_ids=[batch.prompt_ids[group] for group in groups],
        response_ids=[batch.response_ids[each] for each in members],
        rollout_logprobs=[batch.rollout_logprobs[each] for each in members],
        finished=batch.finished[members],
        rewards=batch.rewards[members],
        advantages=batch.advantages[members],
        parts=np.zeros(0, np.int32),
    )


def streamed(policy: PolicyRank, batch: RolloutBatch, added: int) -> dict[str, float]:
    """The metrics of an update of which `added` parts come first."""
    for part in range(added):
        policy.update(part_of(batch, part), part, False)
    return policy.update(batch, added).metrics


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_parts_that_are_added_early_change_no_bit(tmp_path: Path, ranks: int, settings: dict[str, Any]) -> None:
    config = tiny_config(tmp_path, **settings)
    with policy_processes(ranks, config) as one, policy_processes(ranks, config) as other:
        for step in WITHOUT_GRADIENT:
            batch, added = step_in_parts(step), 1 + step % 2
            assert other.run(streamed, batch, added) == one.run(streamed, batch, 0)
            assert state_of(other) == state_of(one)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_update_is_that_of_the_whole_step_up_to_rounding(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = tiny_config(tmp_path, **settings)
    with policy_processes(1, config) as streaming, policy_processes(1, config) as whole:
        batch = step_in_parts(1)
        [found] = streaming.run(streamed, batch, 2)
        [expected] = whole.run(streamed, replace(batch, parts=np.zeros(0, np.int32)), 0)
        assert found.keys() == expected.keys()
        for name in found.keys() - {"micro_batches", "compilations"}:
            assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name
        [of_found], [of_expected] = streaming.run(parameters), whole.run(parameters)
        for name, values in of_expected.items():
            # AdamW's first step is the sign of a gradient, which rounding may turn if the gradient is tiny.
            differs = np.abs(of_found[name] - values) > 1e-6
            assert differs.mean() < 1e-3, name


def test_the_update_repeats_all_parts_after_a_failure_in_one(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, snapshots=True, learning_rate=1e-3)
    with policy_processes(2, config) as one, policy_processes(2, config) as other:
        expected = [(one.run(streamed, step_in_parts(step), 0), state_of(one)) for step in (1, 2, 3)]
        for step, fault in ((1, between_micro_batches), (2, in_first_backward)):
            batch = step_in_parts(step)
            other.call("update", part_of(batch, 0), 0, False)
            other.run(inject, fault)
            outcomes = other.outcomes(partial(PolicyRank.update, batch=part_of(batch, 1), added=1, ends=False))
            assert isinstance(outcomes[FAILING_RANK], torch.OutOfMemoryError)
            assert all(other.call("can_undo_update"))
            other.rejoin(undo_update=True)
            assert (other.run(streamed, batch, 0), state_of(other)) == expected[step - 1]
        batch = step_in_parts(3)
        other.call("update", part_of(batch, 0), 0, False)
        other.call("drop_update")
        assert (other.run(streamed, batch, 0), state_of(other)) == expected[2]


def test_an_update_with_other_parts_than_it_expects_is_refused(tmp_path: Path) -> None:
    def outcome(policy: RankProcesses, added: int) -> Any:
        [found] = policy.outcomes(partial(PolicyRank.update, batch=step_in_parts(1), added=added))
        return found

    with policy_processes(1, tiny_config(tmp_path)) as policy:
        policy.call("update", part_of(step_in_parts(1), 0), 0, False)
        refused = outcome(policy, 2)
        assert isinstance(refused, RuntimeError)
        assert "expected 2 parts of step 1 in the gradients, found 1" in str(refused)
        assert outcome(policy, 0).metrics["micro_batches"] > 0
