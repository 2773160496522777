"""Generation on several engines, of which some are lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from rljob_memory.sample import MemorySample
from rljob_trainer.errors import PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.roles import generation
from rljob_trainer.rollout.work import WholeGroups
from rljob_trainer.rollout_batch import Completion

PROMPTS = range(7)
GROUP_SIZE = 2


@dataclass
class SimulatedEngine:
    """A process of an engine. Its calls return what is done when they are waited for."""

    name: str
    fails: list[WorkerLost] = field(default_factory=list)
    is_first: bool = True
    received: list[Any] = field(default_factory=list)

    @property
    def generate_for_step(self) -> SimulatedEngine:
        return self

    def remote(self, _step: int, work: WholeGroups) -> Callable[[], Any]:
        self.received.append(work)

        def call() -> Any:
            if self.fails:
                raise self.fails[0].of(self.name)
            texts = [
                Completion([token], [0.0], True, f"{token}/{seed}/{member}")
                for [token], seed in zip(work.prompts, work.seeds, strict=True)
                for member in range(work.group_size)
            ]
            return (texts if self.is_first else []), MemorySample()

        return call


@dataclass
class SimulatedEngines:
    handles: dict[str, SimulatedEngine]
    size: int

    @property
    def units(self) -> list[tuple[str, ...]]:
        names = tuple(self.handles)
        return [names[first : first + self.size] for first in range(0, len(names), self.size)]


def wait_for(calls: dict[str, Any], _doing: str, on_result: Callable[[str, Any], None]) -> None:
    """The last calls end first."""
    for name, call in reversed(calls.items()):
        on_result(name, call())


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "wait_for", wait_for)


def generated(
    engines: list[SimulatedEngine], may_replace: bool = True, size: int = 1
) -> tuple[list[str], dict[int, list[str]], list[str]]:
    """The texts; those that arrived, by the index of the first; the replaced engines."""
    arrived: dict[int, list[str]] = {}
    replaced: list[str] = []

    def replacement(failure: WorkerLost) -> dict[str, Any] | None:
        replaced.append(failure.actor or "")
        return {} if may_replace else None

    run: generation.Generation[Completion] = generation.Generation(
        cast(Any, SimulatedEngines({engine.name: engine for engine in engines}, size)),
        1,
        len(PROMPTS),
        lambda share: WholeGroups([[n] for n in share], GROUP_SIZE, [100 + n for n in share]),
        lambda first, found: arrived.update({first * GROUP_SIZE: [each.text for each in found]}),
        replacement,
    )
    return [each.text for each in run.finish()[0]], arrived, replaced


EXPECTED = [f"{index}/{100 + index}/{member}" for index in range(len(PROMPTS)) for member in range(GROUP_SIZE)]


def engines(*lost: int, count: int = 3, failure: type[WorkerLost] = WorkerLost, size: int = 1) -> list[SimulatedEngine]:
    return [
        SimulatedEngine(f"rollout-{n}", [failure("died")] if n in lost else [], n % size == 0) for n in range(count)
    ]


@pytest.mark.parametrize("lost", [(), (0,), (1,), (2,), (0, 2), (0, 1)])
def test_the_prompts_of_lost_engines_move_to_the_others(lost: tuple[int, ...]) -> None:
    texts, arrived, replaced = generated(engines(*lost))
    assert texts == EXPECTED
    assert [text for first in sorted(arrived) for text in arrived[first]] == EXPECTED
    assert all(EXPECTED[first] == found[0] for first, found in arrived.items())
    assert sorted(replaced) == [f"rollout-{number}" for number in lost], "each is replaced once"


@pytest.mark.parametrize(("lost", "count"), [((0,), 1), ((0, 1), 2)])
def test_without_another_engine_the_step_fails(lost: tuple[int, ...], count: int) -> None:
    with pytest.raises(WorkerLost):
        generated(engines(*lost, count=count))


def test_without_permission_the_step_fails() -> None:
    with pytest.raises(WorkerLost):
        generated(engines(1), may_replace=False)


def test_an_engine_that_hangs_is_not_replaced() -> None:
    with pytest.raises(PhaseDeadlineExceeded):
        generated(engines(1, failure=PhaseDeadlineExceeded))


@pytest.mark.parametrize(("processes", "size"), [(4, 2), (3, 1), (2, 2), (4, 4), (16, 2)])
def test_all_processes_of_an_engine_get_the_same_prompts(processes: int, size: int) -> None:
    all_processes = engines(count=processes, size=size)
    texts, arrived, _ = generated(all_processes, size=size)
    assert texts == EXPECTED
    assert sum(map(len, arrived.values())) == len(EXPECTED)
    for first in range(0, processes, size):
        assert all(each.received == all_processes[first].received for each in all_processes[first : first + size])


@pytest.mark.parametrize("lost", [(0,), (1,), (4,), (5,), (2, 3), (0, 5)])
def test_an_engine_is_lost_with_any_of_its_processes(lost: tuple[int, ...]) -> None:
    texts, arrived, replaced = generated(engines(*lost, count=6, size=2), size=2)
    assert texts == EXPECTED
    assert sum(map(len, arrived.values())) == len(EXPECTED), "no completion arrives twice"
    assert {int(name[-1]) // 2 for name in replaced} == {number // 2 for number in lost}
    assert len(replaced) == len({number // 2 for number in lost}), "each engine is replaced once"


def test_a_step_fails_with_its_only_engine() -> None:
    with pytest.raises(WorkerLost):
        generated(engines(1, count=2, size=2), size=2)
