"""The queue from which engines take their work."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.roles.work_queue import WorkQueue
from rljob_trainer.rollout_batch import Prompt
from rljob_trainer.runtime.response_lengths import ResponseLengths
from tests.unit.trainer.simulated_decoding import drawn_lengths, least_steps, steps_with_queue, steps_with_shares


def test_engines_with_room_for_all_get_equal_work() -> None:
    queue = WorkQueue([3, 9, 1, 1, 1, 3], concurrent_sequences=64, sequences=8)
    assert queue.first_portions(2) == [[1], [0, 5, 2, 3, 4]]
    assert len(queue) == queue.sequences_left == 0


def test_items_of_unknown_length_keep_their_order() -> None:
    queue = WorkQueue([1.0] * 7, concurrent_sequences=256, sequences=8)
    assert queue.first_portions(3) == [[0, 3, 6], [1, 4], [2, 5]]


def test_what_an_engine_cannot_generate_at_once_waits() -> None:
    queue = WorkQueue(list(range(10)), concurrent_sequences=16, sequences=8)
    assert queue.first_portions(2) == [[9, 6, 5], [8, 7, 4]], "two at once, and one in reserve"
    assert queue.sequences_left == 16, "an engine asks for more when it has no reserve"
    assert queue.portion(24, 2) == []
    assert queue.portion(16, 2) == [3]
    assert queue.portion(9, 2) == [2, 1]
    assert queue.portion(0, 2) == [0]
    assert queue.sequences_left == 0, "nothing waits: it reports when a group is complete"


def test_no_engine_has_a_reserve_while_another_idles() -> None:
    queue = WorkQueue([1.0] * 4, concurrent_sequences=8, sequences=8)
    queue.first_portions(1)
    assert queue.portion(0, 2) == [2], "the other one is for the second engine"


def test_items_of_a_lost_engine_are_taken_in_order() -> None:
    queue = WorkQueue([5, 4, 3, 2, 1], concurrent_sequences=1)
    assert queue.first_portions(2) == [[0, 3], [1, 2]]
    queue.put_back([0, 3])
    assert queue.portion(0, 1) == [0, 3]
    assert queue.portion(0, 1) == [4]


@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.integers(1, 300),
    st.integers(1, 16),
    st.integers(1, 5),
)
def test_every_item_is_dealt_once(
    expected: list[int],
    concurrent: int,
    sequences: int,
    engines: int,
) -> None:
    queue = WorkQueue([float(each) for each in expected], concurrent, sequences)
    dealt = [item for portion in queue.first_portions(engines) for item in portion]
    while len(queue):
        more = queue.portion(0, engines)
        assert more, "an engine that idles gets an item that waits"
        dealt += more
    assert sorted(dealt) == list(range(len(expected)))


def prompts(*items: int) -> list[Prompt]:
    return [Prompt(item, [1], "") for item in items]


def test_an_item_is_expected_to_take_as_long_as_in_the_last_epoch() -> None:
    lengths = ResponseLengths()
    assert lengths.expected(prompts(3, 4)) == [1.0, 1.0]
    lengths.observe([3, 4], [10, 20, 2, 4], group_size=2)
    assert lengths.expected(prompts(4, 3, 5)) == [3.0, 15.0, 9.0], "an unknown one as all responses so far"
    lengths.observe([3], [6, 6], group_size=2)
    assert lengths.expected(prompts(3, 5)) == [6.0, 8.0]


@pytest.mark.parametrize("seed", range(5))
def test_if_the_longest_come_first_hardly_a_slot_idles(seed: int) -> None:
    engines, groups, concurrent, group_size = 4, 64, 32, 8
    means, lengths = drawn_lengths(Random(seed), groups, group_size)
    least = least_steps(engines, concurrent, lengths)
    assert steps_with_queue(WorkQueue(means, concurrent, group_size), engines, lengths) < 1.1 * least
    assert steps_with_shares(engines, concurrent, lengths) > 1.1 * least, "the test needs responses that differ"
