"""Generation on several engines, which take prompts from a queue, and of which some are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from rljob_client.errors import RunError
from rljob_memory.sample import MemorySample
from rljob_trainer.errors import PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.roles import generation
from rljob_trainer.roles.work_queue import WorkQueue
from rljob_trainer.rollout.lots import HeldGroup, LotResult, Segment, deal, generate_lot, unstarted
from rljob_trainer.rollout.work import EngineWork, Generated, Lots, WholeGroups
from rljob_trainer.rollout_batch import Completion

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
    """Of lengths that depend on the prompt alone: 3, 7, 11 or 15 tokens."""
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


def next_result(calls: dict[str, Any], doing: str) -> tuple[str, Any]:
    """The last call ends first."""
    name = list(calls)[-1]
    return name, result_of(calls[name], name, doing)


def result_of(call: Any, _name: str, _doing: str) -> Any:
    return call()


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "next_result", next_result)
    monkeypatch.setattr(generation, "result_of", result_of)
    monkeypatch.setattr(generation, "wait_for", lambda _calls, _doing: {})


@dataclass
class Run:
    """A generation, with its reports."""

    engines: list[SimulatedEngine]
    may_replace: bool = True
    size: int = 1
    concurrent: int = 64
    expected: list[float] = field(default_factory=lambda: [1.0] * PROMPTS)
    arrived: dict[int, list[str]] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
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
        self.replaced.append(failure.actor or "")
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


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("concurrent", [1, 64])
@pytest.mark.parametrize("lost", [(), (0,), (1,), (2,), (0, 2), (0, 1)])
def test_the_prompts_of_lost_engines_move_to_the_others(lost: tuple[int, ...], concurrent: int, after: int) -> None:
    run = Run(engines(*lost, after=after), concurrent=concurrent)
    assert run.finish() == EXPECTED
    assert set(run.replaced) <= {f"rollout-{number}" for number in lost}
    assert len(run.replaced) == len(set(run.replaced)), "each is replaced once"
    assert after or len(run.replaced) == len(lost)


@pytest.mark.parametrize(("lost", "count"), [((0,), 1), ((0, 1), 2)])
def test_without_another_engine_the_step_fails(lost: tuple[int, ...], count: int) -> None:
    with pytest.raises(WorkerLost):
        Run(engines(*lost, count=count)).finish()


def test_without_permission_the_step_fails() -> None:
    with pytest.raises(WorkerLost):
        Run(engines(1), may_replace=False).finish()


def test_an_engine_that_hangs_is_not_replaced() -> None:
    with pytest.raises(PhaseDeadlineExceeded):
        Run(engines(1, failure=PhaseDeadlineExceeded)).finish()


@pytest.mark.parametrize("concurrent", [1, 64])
@pytest.mark.parametrize(("processes", "size"), [(4, 2), (3, 1), (2, 2), (4, 4), (16, 2)])
def test_all_processes_of_an_engine_get_the_same_calls(processes: int, size: int, concurrent: int) -> None:
    run = Run(engines(count=processes, size=size), size=size, concurrent=concurrent)
    assert run.finish() == EXPECTED
    for first in range(0, processes, size):
        assert all(each.received == run.engines[first].received for each in run.engines[first : first + size])


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("lost", [(0,), (1,), (4,), (5,), (2, 3), (0, 5)])
def test_an_engine_is_lost_with_any_of_its_processes(lost: tuple[int, ...], after: int) -> None:
    run = Run(engines(*lost, count=6, size=2, after=after), size=2)
    assert run.finish() == EXPECTED
    assert {int(name[-1]) // 2 for name in run.replaced} == {number // 2 for number in lost}
    assert len(run.replaced) == len({number // 2 for number in lost}), "each engine is replaced once"


def test_a_step_fails_with_its_only_engine() -> None:
    with pytest.raises(WorkerLost):
        Run(engines(1, count=2, size=2), size=2).finish()


def test_engines_begin_with_the_longest_and_ask_for_more() -> None:
    run = Run(engines(count=2), concurrent=2, expected=[1, 2, 3, 4, 5, 6, 7])
    assert [engine.begun for engine in run.engines] == [[6, 3], [5, 4]], "one at once, and one in reserve"
    assert [engine.received[0][3] for engine in run.engines] == [2, 2], "they report when the reserve is used up"
    run.finish()
    assert sorted(run.engines[0].begun + run.engines[1].begun) == list(range(PROMPTS))
    assert run.engines[1].begun[2:] == [2, 1, 0], "the engine whose calls end first takes all others"
    assert run.engines[1].received[-1][3] == 0, "nothing waits: it reports when a group is complete"


def test_each_group_is_reported_while_others_are_generated() -> None:
    run = Run(engines(count=1))
    seen: list[int] = []
    run.generation.on_result = lambda place, _group: seen.append(place * len(run.engines[0].received))
    run.generation.finish()
    assert seen == [place * (place + 1) for place in range(PROMPTS)], "one after each call"


def test_engines_get_more_while_the_controller_waits_for_something_else() -> None:
    run = Run(engines(count=2), concurrent=1)
    while pending := run.generation.pending():
        run.generation.serve(next(iter(pending)))
    assert len(run.arrived) == PROMPTS
    assert run.finish() == EXPECTED


def test_a_failure_meanwhile_is_raised_when_the_results_are_needed() -> None:
    run = Run(engines(0, count=2), may_replace=False)
    while pending := run.generation.pending():
        run.generation.serve(next(iter(pending)))
    assert run.replaced == []
    with pytest.raises(WorkerLost):
        run.finish()

    run = Run(engines(0, count=2))
    run.generation.serve("rollout-0")
    assert run.finish() == EXPECTED


def test_two_generations_have_different_numbers() -> None:
    first, second = Run(engines(count=1)), Run(engines(count=1))
    assert first.engines[0].received[0][1] != second.engines[0].received[0][1], "an engine drops the work of another"


@pytest.mark.parametrize("lost", [(0,), (2,), (0, 1), (1, 2)])
def test_the_lots_of_lost_engines_have_the_same_outcome(lost: tuple[int, ...]) -> None:
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

    assert outcome(*lost) == outcome()
    assert sum(len(lot.completed) for lot in outcome(*lost)) == 6
    assert sum(len(lot.left) for lot in outcome(*lost)) == 3


def test_an_absent_engine_gets_no_work() -> None:
    run = Run(engines(count=3), absent={"rollout-1"})
    assert [bool(engine.begun) for engine in run.engines] == [True, False, True]
    assert run.finish() == EXPECTED
