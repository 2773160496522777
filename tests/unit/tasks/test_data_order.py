from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.tasks.task import prompts_of_step

sizes = st.integers(1, 50)
counts = st.integers(1, 120)
seeds = st.integers(0, 2**31 - 1)


def drawn(steps: int, count: int, size: int, seed: int) -> list[int]:
    return [index for step in range(1, steps + 1) for index in prompts_of_step(step, count, size, seed)]


@given(size=sizes, count=counts, steps=st.integers(1, 12), seed=seeds)
def test_no_item_is_lost_or_repeated_within_an_epoch(size: int, count: int, steps: int, seed: int) -> None:
    indices = drawn(steps, count, size, seed)
    for start in range(0, len(indices) - size + 1, size):
        assert sorted(indices[start : start + size]) == list(range(size))
    rest = indices[len(indices) - len(indices) % size :]
    assert len(set(rest)) == len(rest)


@given(size=sizes, count=counts, step=st.integers(1, 1000), seed=seeds)
def test_a_step_draws_the_same_items_whichever_steps_were_drawn_before(
    size: int, count: int, step: int, seed: int
) -> None:
    prompts_of_step(step + 1, count, size, seed)
    assert prompts_of_step(step, count, size, seed) == prompts_of_step(step, count, size, seed)
    # Split in other ways, the same row of items comes out.
    assert drawn(6, count, size, seed) == drawn(3, 2 * count, size, seed)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = prompts_of_step(1, 100, 100, seed=0), prompts_of_step(2, 100, 100, seed=0)
    assert first != second
    assert first != prompts_of_step(1, 100, 100, seed=1)
    assert first != list(range(100))
