"""Prompts that are held out of the training task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_client.errors import BadInput
from rljob_trainer.tasks.held_out import Without, held_out
from rljob_trainer.tasks.task import Task


def task_of(items: Sequence[Any], seed: int = 0, kept: Sequence[int] | None = None) -> Task:
    return Task("sums", cast(Any, items), cast(Any, None), cast(Any, None), max_prompt_tokens=8, seed=seed, kept=kept)


@given(st.lists(st.integers(), min_size=1, max_size=30), st.data())
def test_a_sequence_without_some_places(values: list[int], data: st.DataObject) -> None:
    places = sorted(data.draw(st.sets(st.integers(0, len(values) - 1))))
    expected = [value for place, value in enumerate(values) if place not in places]
    without = Without(values, places)
    assert list(without) == expected
    assert without[:4] == expected[:4]


def test_held_out_prompts_are_never_trained_on_and_follow_from_the_seed() -> None:
    trained, evaluated = held_out(task_of(range(100)), 20)
    assert len(evaluated) == 20
    assert len(trained) == 80
    assert sorted([*trained.indices, *evaluated.indices]) == list(range(100))
    of_an_epoch = {index for step in range(1, 9) for index in trained.items_of_step(step, 10)}
    assert of_an_epoch == set(trained.indices)
    assert held_out(task_of(range(100)), 20)[1].indices == evaluated.indices
    assert held_out(task_of(range(100), seed=1), 20)[1].indices != evaluated.indices


def test_skipped_prompts_are_not_held_out_and_large_sources_are_not_copied() -> None:
    kept = range(0, 100, 2)
    _, evaluated = held_out(task_of(range(100), kept=kept), 10)
    assert set(evaluated.indices) < set(kept)
    trained, evaluated = held_out(task_of(range(2**31 - 1)), 10)
    assert len(trained) == 2**31 - 11
    assert not set(trained.items_of_step(1, 1000)) & set(evaluated.indices)


@pytest.mark.parametrize("count", [10, 11])
def test_prompts_must_remain_to_train_on(count: int) -> None:
    with pytest.raises(BadInput, match=r"heldOut to be less than 10, the number of prompts .* found 1") as failure:
        held_out(task_of(range(10)), count)
    assert failure.value.field == ("spec", "evaluation", "heldOut")
