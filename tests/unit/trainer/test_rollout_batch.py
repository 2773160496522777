"""Rollouts of a step survive a round trip to disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_trainer.rollout_batch import Completion, Prompt, RolloutBatch

completions = st.builds(
    lambda ids, finished: Completion(ids, [-0.25 * (i + 1) for i in ids], finished, "text"),
    st.lists(st.integers(0, 2**31 - 1), max_size=6),
    st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_a_saved_batch_loads_unchanged(tmp_path: Path, data: st.DataObject, prompts: int, group_size: int) -> None:
    asked = [
        Prompt(index, data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=5)), "") for index in range(prompts)
    ]
    answered = data.draw(st.lists(completions, min_size=prompts * group_size, max_size=prompts * group_size))
    rewards = np.linspace(-1, 1, len(answered), dtype=np.float32)
    batch = RolloutBatch.of(7, group_size, asked, answered).scored(rewards, -rewards)

    batch.save(tmp_path / "batch.npz")
    loaded = RolloutBatch.load(tmp_path / "batch.npz")

    assert (loaded.step, loaded.group_size, len(loaded)) == (7, group_size, len(answered))
    for name in ("prompt_ids", "response_ids", "rollout_logprobs"):
        before, after = getattr(batch, name), getattr(loaded, name)
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
    for name in ("finished", "rewards", "advantages"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(loaded, name))
    assert batch.prompt_tokens == sum(len(p.token_ids) for p in asked) * group_size
    assert batch.response_tokens == sum(len(c.token_ids) for c in answered)


def test_too_few_completions_are_refused() -> None:
    with pytest.raises(ValueError, match="1 prompts × 2 completions, found 1"):
        RolloutBatch.of(1, 2, [Prompt(0, [1], "")], [Completion([1], [-1.0], True, "")])
