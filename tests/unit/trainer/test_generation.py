"""Generation on several engines, which take prompts from a queue, and of which some are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rljob_client.errors import RunError
from rljob_memory.sample import MemorySample
from rljob_trainer.errors import PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.roles import generation
from rljob_trainer.roles.generation import WorkQueue
from rljob_trainer.rollout.lots import (
    EngineWork,
    Generated,
    HeldGroup,
    LotResult,
    Lots,
    Segment,
    WholeGroups,
    deal,
    generate_lot,
    unstarted,
)
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.runtime.step_rollouts import ResponseLengths
from tests.unit.trainer.simulated_decoding import drawn_lengths, least_steps, steps_with_queue, steps_with_shares


def test_what_an_engine_cannot_generate_at_once_waits() -> None:
    queue = WorkQueue(list(range(10)), concurrent_sequences=16, sequences=8)
    assert queue.first_portions(2) == [[9, 6, 5], [8, 7, 4]], "two at once, and one in reserve"
    assert queue.sequences_left == 16, "an engine asks for more when it has no reserve"
    assert queue.portion(24, 2) == []
    assert queue.portion(16, 2) == [3]
    queue.put_back([6, 9])  # of a lost engine
    assert queue.portion(9, 2) == [9, 6]
    assert queue.portion(0, 2) == [2, 1]
    assert queue.portion(0, 1) == [0]
    assert queue.sequences_left == 0, "nothing waits: it reports when a group is complete"
    few = WorkQueue([1.0] * 4, concurrent_sequences=8, sequences=8)
    few.first_portions(1)
    assert few.portion(0, 2) == [2], "the other one is for the second engine, which would idle"


def test_engines_with_room_for_all_get_equal_work() -> None:
    queue = WorkQueue([3, 9, 1, 1, 1, 3], 64, sequences=8)
    assert queue.first_portions(2) == [[1], [0, 5, 2, 3, 4]]
    assert len(queue) == queue.sequences_left == 0
    of_unknown_length = WorkQueue([1.0] * 7, 256, sequences=8)
    assert of_unknown_length.first_portions(3) == [[0, 3, 6], [1, 4], [2, 5]], "they keep their order"


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 300), st.integers(1, 16), st.integers(1, 5))
def test_every_item_is_dealt_once(expected: list[int], concurrent: int, sequences: int, engines: int) -> None:
    queue = WorkQueue([float(each) for each in expected], concurrent, sequences)
    dealt = [item for portion in queue.first_portions(engines) for item in portion]
    while len(queue):
        more = queue.portion(0, engines)
        assert more, "an engine that idles gets an item that waits"
        dealt += more
    assert sorted(dealt) == list(range(len(expected)))


def test_an_item_is_expected_to_take_as_long_as_in_the_last_epoch() -> None:
    def expected(*items: int) -> list[float]:
        return list(lengths.expected([Prompt(item, [1], "") for item in items]))

    lengths = ResponseLengths()
    assert expected(3, 4) == [1.0, 1.0]
    lengths.observe([3, 4], [10, 20, 2, 4], group_size=2)
    assert expected(4, 3, 5) == [3.0, 15.0, 9.0], "an unknown one as all responses so far"
    lengths.observe([3], [6, 6], group_size=2)
    assert expected(3, 5) == [6.0, 8.0]


@pytest.mark.parametrize("seed", range(5))
def test_if_the_longest_come_first_hardly_a_slot_idles(seed: int) -> None:
    engines, groups, concurrent, group_size = 4, 64, 32, 8
    means, lengths = drawn_lengths(Random(seed), groups, group_size)
    least = least_steps(engines, concurrent, lengths)
    assert steps_with_queue(WorkQueue(means, concurrent, group_size), engines, lengths) < 1.1 * least
    assert steps_with_shares(engines, concurrent, lengths) > 1.1 * least, "the test needs responses that differ"


PROMPTS = 7
GROUP_SIZE = 2


@dataclass
class SimulatedEngine:
    """A process of an engine. Each of its calls completes one of its groups, when its result is taken."""

    name: str
    fails: list[RunError] = field(default_factory=list)
    fails_after: int = 0
    """Calls that succeed before."""
    is_first: bool = True
    received: list[tuple[int, int, EngineWork, int]] = field(default_factory=list)
    groups: list[tuple[int, list[Completion]]] = field(default_factory=list)

    @property
    def generate_for_step(self) -> SimulatedEngine:
        return self

    def remote(self, step: int, number: int, work: EngineWork, sequences_left: int) -> Callable[[], Generated]:
        self.received.append((step, number, work, sequences_left))
        fails = self.fails and len(self.received) > self.fails_after

        def call() -> Generated:
            if fails:
                raise self.fails[0].of(self.name)
            if not isinstance(work, WholeGroups):
                results = [generate_lot(lot, MAX_TOKENS, 3, response_parts) for lot in work.lots]
                found = list(zip(work.places, results, strict=True))
                return Generated(found if self.is_first else [], 0, MemorySample())
            for place, [token], seed in zip(work.places, work.prompts, work.seeds, strict=True):
                texts = [f"{token}/{seed}/{member}" for member in range(work.group_size)]
                self.groups.append((place, [Completion([token], [0.0], True, text) for text in texts]))
            done, self.groups = self.groups[:1], self.groups[1:]
            left = len(self.groups) * work.group_size
            return Generated(done if self.is_first else [], left, None if left else MemorySample())

        return call

    @property
    def begun(self) -> list[int]:
        """The prompts that it got, in order."""
        return [place for _, _, work, _ in self.received for place in work.places]


MAX_TOKENS = 16


def response_parts(segments: list[Segment]) -> list[Completion]:
    """Completions with lengths that depend on the prompt alone: 3, 7, 11 or 15 tokens."""
    parts = []
    for segment in segments:
        left = 3 + 4 * (segment.token_ids[0] % 4) - (len(segment.token_ids) - 1)
        count = min(left, segment.max_tokens)
        parts.append(Completion([9] * count, [-1.0] * count, count == left, ""))
    return parts


@dataclass
class SimulatedEngines:
    handles: dict[str, SimulatedEngine]
    size: int
    absent: set[str] = field(default_factory=set)

    @property
    def working(self) -> list[tuple[str, ...]]:
        return [unit for unit in self.units if unit[0] not in self.absent]

    @property
    def units(self) -> list[tuple[str, ...]]:
        names = tuple(self.handles)
        return [names[first : first + self.size] for first in range(0, len(names), self.size)]


@pytest.fixture(scope="module", autouse=True)
def _without_ray() -> Iterator[None]:
    """The last call ends first."""

    def next_result(calls: dict[str, Any], _doing: str) -> tuple[str, Any]:
        name = list(calls)[-1]
        return name, calls[name]()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "next_result", next_result)
        patch.setattr(generation, "result_of", lambda call, _name, _doing: call())
        patch.setattr(generation, "wait_for", lambda _calls, _doing: {})
        yield


@dataclass
class GenerationRun:
    """A generation, with its reports."""

    engines: list[SimulatedEngine]
    may_replace: bool = True
    size: int = 1
    concurrent: int = 64
    expected: list[float] = field(default_factory=lambda: [1.0] * PROMPTS)
    arrived: dict[int, list[str]] = field(default_factory=dict)
    replaced: list[int] = field(default_factory=list)
    """Numbers of the engines."""
    absent: set[str] = field(default_factory=set)
    generation: generation.Generation[list[Completion]] = field(init=False)

    def __post_init__(self) -> None:
        self.generation = generation.Generation(
            cast(Any, SimulatedEngines({engine.name: engine for engine in self.engines}, self.size, self.absent)),
            1,
            WorkQueue(self.expected, self.concurrent, GROUP_SIZE),
            lambda places: WholeGroups(places, [[n] for n in places], GROUP_SIZE, [100 + n for n in places]),
            self._arrived,
            self._replacement,
        )

    def _arrived(self, place: int, group: list[Completion]) -> None:
        assert place not in self.arrived, "a group arrived twice"
        self.arrived[place] = [each.text for each in group]

    def _replacement(self, failure: WorkerLost) -> dict[str, Any] | None:
        self.replaced.append(int((failure.actor or "").partition("-")[2]) // self.size)
        return {} if self.may_replace else None

    def finish(self) -> list[str]:
        groups, _ = self.generation.finish()
        texts = [each.text for group in groups for each in group]
        assert [text for place in sorted(self.arrived) for text in self.arrived[place]] == texts
        return texts


EXPECTED = [f"{index}/{100 + index}/{member}" for index in range(PROMPTS) for member in range(GROUP_SIZE)]


def engines(
    *lost: int, count: int = 3, failure: type[RunError] = WorkerLost, size: int = 1, after: int = 0
) -> list[SimulatedEngine]:
    return [
        SimulatedEngine(f"rollout-{n}", [failure("died")] if n in lost else [], after, n % size == 0)
        for n in range(count)
    ]


@given(
    count=st.integers(1, 4),
    size=st.sampled_from([1, 2, 4]),
    lost=st.sets(st.integers(0, 15), max_size=5),
    concurrent=st.sampled_from([1, 64]),
    after=st.integers(0, 1),
)
@example(count=3, size=1, lost={0, 2}, concurrent=64, after=0)
@example(count=3, size=2, lost={2, 3}, concurrent=64, after=1)
@example(count=2, size=1, lost={0, 1}, concurrent=64, after=0)
def test_the_prompts_of_lost_engines_move_to_the_others(
    count: int, size: int, lost: set[int], concurrent: int, after: int
) -> None:
    """An engine is lost with any of its `size` processes, after some calls. The step fails if all engines are lost."""
    processes = engines(*lost, count=count * size, size=size, after=after)
    run = GenerationRun(processes, size=size, concurrent=concurrent)
    lost_engines = {process // size for process in lost if process < count * size}
    try:
        assert run.finish() == EXPECTED
    except WorkerLost:
        assert len(lost_engines) == count
        return
    assert len(run.replaced) == len(set(run.replaced)), "each is replaced once"
    assert set(run.replaced) <= lost_engines
    if not after:
        assert len(run.replaced) == len(lost_engines) < count
    for number in set(range(count)) - lost_engines:
        of_engine = processes[number * size : (number + 1) * size]
        assert all(each.received == of_engine[0].received for each in of_engine), "all get the same calls"


def test_an_engine_is_replaced_only_if_it_is_lost_and_may_be() -> None:
    with pytest.raises(WorkerLost):
        GenerationRun(engines(1), may_replace=False).finish()
    with pytest.raises(PhaseDeadlineExceeded):
        GenerationRun(engines(1, failure=PhaseDeadlineExceeded)).finish()


def test_engines_begin_with_the_longest_and_ask_for_more() -> None:
    run = GenerationRun(engines(count=2), concurrent=2, expected=[1, 2, 3, 4, 5, 6, 7])
    assert [engine.begun for engine in run.engines] == [[6, 3], [5, 4]], "one at once, and one in reserve"
    assert [engine.received[0][3] for engine in run.engines] == [2, 2], "they report when the reserve is used up"
    run.finish()
    assert sorted(run.engines[0].begun + run.engines[1].begun) == list(range(PROMPTS))
    assert run.engines[1].begun[2:] == [2, 1, 0], "the engine whose calls end first takes all others"
    assert run.engines[1].received[-1][3] == 0, "nothing waits: it reports when a group is complete"


def test_an_absent_engine_gets_no_work() -> None:
    run, other = GenerationRun(engines(count=3), absent={"rollout-1"}), GenerationRun(engines(count=1))
    assert [bool(engine.begun) for engine in run.engines] == [True, False, True]
    assert run.finish() == EXPECTED
    numbers = {engine.received[0][1] for engine in run.engines if engine.received}
    assert other.engines[0].received[0][1] not in numbers, "an engine drops the work of another generation"


def test_each_group_is_reported_while_others_are_generated() -> None:
    run = GenerationRun(engines(count=1))
    seen: list[int] = []
    run.generation.on_result = lambda place, _group: seen.append(place * len(run.engines[0].received))
    run.generation.finish()
    assert seen == [place * (place + 1) for place in range(PROMPTS)], "one after each call"


def served(run: GenerationRun) -> GenerationRun:
    """A run whose results are taken while the controller waits for something else."""
    while pending := run.generation.pending():
        run.generation.serve(next(iter(pending)))
    return run


def test_engines_get_more_while_the_controller_waits_for_something_else() -> None:
    run = served(GenerationRun(engines(count=2), concurrent=1))
    assert len(run.arrived) == PROMPTS
    assert run.finish() == EXPECTED


def test_a_failure_during_other_work_is_raised_with_the_results() -> None:
    run = served(GenerationRun(engines(0, count=2), may_replace=False))
    assert run.replaced == []
    with pytest.raises(WorkerLost):
        run.finish()
    assert served(GenerationRun(engines(0, count=2))).finish() == EXPECTED


def test_the_lots_of_lost_engines_have_the_same_outcome() -> None:
    """The prompts that a step takes or leaves do not depend on which engine generates them."""
    held = [HeldGroup(unstarted(position, GROUP_SIZE), [position], 100 + position) for position in range(9)]
    lots = deal([], held, quota=6, lots=3)

    def outcome(*lost: int) -> list[LotResult]:
        run: generation.Generation[LotResult] = generation.Generation(
            cast(Any, SimulatedEngines({engine.name: engine for engine in engines(*lost)}, 1)),
            1,
            WorkQueue([1.0] * len(lots), concurrent_sequences=1),
            lambda places: Lots(places, [lots[place] for place in places]),
            lambda _place, _result: None,
            lambda _failure: {},
        )
        return run.finish()[0]

    for lost in ((0,), (2,), (0, 1), (1, 2)):
        assert outcome(*lost) == outcome()
    assert sum(len(lot.completed) for lot in outcome()) == 6
    assert sum(len(lot.left) for lot in outcome()) == 3
