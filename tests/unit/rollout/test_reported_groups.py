"""Calls to a rollout process: groups that it reports, and those that remain."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_api.algorithm import AlgorithmSpec
from rljob_memory.sample import MemorySample
from rljob_trainer.roles.rollout_actor import RolloutActor
from rljob_trainer.rollout import engine as engine_module
from rljob_trainer.rollout.lots import Generated, WholeGroups
from rljob_trainer.rollout_batch import Completion

GROUP_SIZE = 2
NOTHING = WholeGroups([], [], GROUP_SIZE, [])


class SimulatedRequests:
    """Stands for those of vLLM. A group of two: one response has half as many tokens as the other."""

    def __init__(self) -> None:
        self.groups: dict[int, int] = {}
        """Decoding steps until each is complete."""
        self.steps = 0

    @property
    def unfinished_sequences(self) -> int:
        return sum(1 if left <= 10 else 2 for left in self.groups.values())

    def add(self, place: int, _prompt: Sequence[int], tokens: int) -> None:
        self.groups[place] = tokens

    def step(self) -> list[tuple[int, Any]]:
        self.steps += 1
        self.groups = {place: left - 1 for place, left in self.groups.items()}
        done = [place for place, left in self.groups.items() if not left]
        for place in done:
            del self.groups[place]
        return [(place, SimpleNamespace(outputs=[None] * GROUP_SIZE)) for place in done]

    def abandon(self) -> None:
        self.groups.clear()


class RecordedCalls:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin_phase(self, _step: int, phase: str) -> None:
        self.seen.append(f"begin {phase}")

    def record(self, _step: int, phase: str) -> MemorySample:
        self.seen.append(f"record {phase}")
        return MemorySample()


class Actor(RolloutActor):
    """Without vLLM and without a model."""

    def __init__(self, longest: int) -> None:
        self._requests = cast(Any, SimulatedRequests())
        self._config = cast(Any, SimpleNamespace(algorithm=AlgorithmSpec(steps=1, max_response_tokens=longest)))
        self._llm = SimpleNamespace(get_tokenizer=lambda: None, reset_prefix_cache=lambda: True)
        self.shard = cast(Any, SimpleNamespace(has_peers=False, is_first=True))
        self._memory_log = cast(Any, RecordedCalls())
        self._generation = None

    def _ready_requests(self) -> Any:
        return self._requests

    def _sampling(self, group_size: int, seed: int, max_tokens: int | None = None, sampling: Any = None) -> int:
        return seed

    def _weight_transfer_backend(self) -> str:
        raise NotImplementedError

    def call(self, work: WholeGroups = NOTHING, generation: int = 1, left: int = 0) -> Generated:
        return self.generate_for_step(1, generation, work, left)

    @property
    def steps(self) -> int:
        return int(cast(Any, self._requests).steps)


def groups(**steps: int) -> WholeGroups:
    """Groups `p0`, `p1`, … that are complete after a number of decoding steps."""
    places = [int(name[1:]) for name in steps]
    return WholeGroups(places, [[place] for place in places], GROUP_SIZE, list(steps.values()))


@pytest.fixture(autouse=True)
def _completions(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Completion([1], [-1.0], True, "")
    monkeypatch.setattr(
        engine_module, "completions_of", lambda outputs, _: [one for each in outputs for _ in each.outputs]
    )


def places(generated: Generated) -> list[int]:
    assert all(len(completions) == GROUP_SIZE for _, completions in generated.results)
    return [place for place, _ in generated.results]


def test_complete_groups_are_reported_while_others_are_generated() -> None:
    actor = Actor(longest=1600)
    first = actor.call(groups(p0=120, p1=500, p2=130))
    assert (places(first), actor.steps, first.unfinished_sequences, first.memory) == ([0], 120, 3, None)
    second = actor.call(groups(p3=40))
    assert (places(second), actor.steps) == ([2, 3], 220), "no report within a sixteenth of the longest response"
    last = actor.call()
    assert (places(last), actor.steps, last.unfinished_sequences) == ([1], 500, 0)
    assert last.memory is not None, "of the whole generation"
    assert cast(Any, actor._memory_log).seen == ["begin rollout", "record rollout"]


def test_short_responses_are_reported_at_once_in_the_end() -> None:
    actor = Actor(longest=12)
    assert places(actor.call(groups(p0=3, p1=12, p2=5))) == [0, 2, 1]
    assert actor.steps == 12


def test_an_engine_asks_for_more_when_its_reserve_is_used_up() -> None:
    actor = Actor(longest=1600)
    asking = actor.call(groups(p0=60, p1=90), left=3)
    assert (places(asking), actor.steps, asking.unfinished_sequences) == ([], 50, 3)
    assert places(actor.call(groups(p2=20))) == [0, 2, 1]


def test_work_of_another_generation_is_dropped() -> None:
    actor = Actor(longest=1600)
    actor.call(groups(p0=60, p1=900), left=3)
    assert places(actor.call(groups(p1=20), generation=2)) == [1]
    assert actor.unfinished_sequences == 0
