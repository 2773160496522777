"""Updates that begin while groups are generated: the steps that have them, and the parts that the policy gets."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rljob_api.algorithm import AlgorithmSpec, DynamicSamplingSpec
from rljob_api.algorithms import ALGORITHMS
from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput
from rljob_trainer.algorithms import advantages
from rljob_trainer.algorithms.advantages import OF_GROUPS, Groups
from rljob_trainer.errors import DeviceOutOfMemory
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout_batch import Completion, Prompt, RolloutBatch
from rljob_trainer.runtime import streamed_update
from rljob_trainer.runtime.step_rollouts import CompleteGroup, GeneratedRollouts
from rljob_trainer.runtime.streamed_update import StreamedUpdate, chosen_by_environment, obstacle_to_streaming
from rljob_trainer.tasks.scoring import KnownRewards

DEFAULTS: dict[str, Any] = {"steps": 1, "prompts_per_step": 16, "group_size": 8}


def obstacle(
    wanted: str | None = None, topology: Any = "Disaggregated", device: str = "cuda", sleeps: bool = False, **of: Any
) -> str | None:
    spec = SimpleNamespace(topology=topology, algorithm=AlgorithmSpec(**(DEFAULTS | of)))
    settings = SimpleNamespace(policy=SimpleNamespace(device=device), rollout=SimpleNamespace(max_num_seqs=64))
    roles = SimpleNamespace(settings=settings, engine_count=2, engines_sleep=sleeps)
    return obstacle_to_streaming(cast(RLJobSpec, spec), cast(Roles, roles), wanted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompts_per_step": 1}, "one group"),
        ({"updates_per_step": 2}, "several updates"),
        ({"max_staleness": 1}, "already learns"),
        ({"dynamic_sampling": DynamicSamplingSpec()}, "chosen when all are scored"),
        ({"name": "reinforce_plus_plus"}, "depend on all groups"),
        ({"name": "reinforce_plus_plus_baseline"}, "depend on all groups"),
        ({"advantage": "own:advantage"}, "depend on all groups"),
        ({"wanted": "0"}, "RLJOB_STREAM_UPDATES is 0"),
        ({"topology": "Colocated"}, "GPUs of their own"),
        ({"device": "cpu"}, "GPUs of their own"),
        ({"ignore_end_of_sequence": True}, "end at the same time"),
        ({"wanted": "1", "topology": "Colocated", "sleeps": True}, "sleep"),
        ({"wanted": "1", "updates_per_step": 2}, "several updates"),
    ],
)
def test_a_step_that_cannot_be_streamed_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in (obstacle(**changes) or "")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ignore_end_of_sequence": True, "prompts_per_step": 17},  # the last ones begin when others have ended
        {"wanted": "1", "ignore_end_of_sequence": True},
        {"wanted": "1", "topology": "Colocated", "device": "cpu"},
        {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "loss": "own:loss", "mask_truncated": True},
    ],
)
def test_a_step_is_streamed_where_it_saves_time_or_is_requested(changes: dict[str, Any]) -> None:
    assert obstacle(**changes) is None


def test_the_variable_has_two_values() -> None:
    assert [chosen_by_environment({"RLJOB_STREAM_UPDATES": value} if value else {}) for value in ("", "0", "1")] == [
        None,
        "0",
        "1",
    ]
    with pytest.raises(BadInput, match="expected 0 or 1 in RLJOB_STREAM_UPDATES, found yes"):
        chosen_by_environment({"RLJOB_STREAM_UPDATES": "yes"})


@pytest.mark.parametrize("name", sorted(OF_GROUPS))
@pytest.mark.parametrize("group_size", [2, 3, 8, 16, 33])
def test_the_advantages_of_a_group_have_the_same_bits_without_the_others(name: str, group_size: int) -> None:
    draw, settings = np.random.default_rng(0), ALGORITHMS["grpo"].defaults
    rewards, kept = draw.normal(size=(9, group_size)), draw.random((9, group_size)) < 0.8
    tokens = draw.integers(1, 50, (9, group_size))
    function = getattr(advantages, name)

    def of(chosen: Sequence[int]) -> list[list[float]]:
        part = Groups(np.where(kept, rewards, 0)[chosen], kept[chosen], tokens[chosen])
        found: list[list[float]] = function(part, settings).tolist()
        return found

    whole = of(range(9))
    for chosen in ([4], [1, 8], [0, 3, 5, 7]):
        assert of(chosen) == [whole[group] for group in chosen]


class Policy:
    """Notes the parts that it gets. A call of each rank ends when the test says so."""

    def __init__(self, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[list[int]] = []
        self.update = StreamedUpdate(groups, self.score, self.add_part)
        monkeypatch.setattr(streamed_update, "result_of", self.result_of)
        self.failure: DeviceOutOfMemory | None = None

    def score(self, generated: GeneratedRollouts) -> RolloutBatch:
        assert generated.rewards.results(stop_at_failure=True) == [[1.0] * len(generated.completions)]
        return RolloutBatch.of(1, 1, generated.prompts, generated.completions)

    def add_part(self, batch: RolloutBatch, added: int) -> dict[str, Any]:
        assert added == len(self.parts)
        self.parts.append([int(ids[0]) for ids in batch.prompt_ids])
        return {"policy-0": object(), "policy-1": object()}

    def result_of(self, *_: Any) -> None:
        if self.failure:
            raise self.failure

    def take(self, *places: int, is_scored: bool = True) -> None:
        completion, rewards = Completion([1], [-1.0], True, ""), KnownRewards([[1.0]])
        for place in places:
            group = CompleteGroup(
                place, Prompt(place, [place], ""), [completion], lambda: rewards if is_scored else None
            )
            self.update.take(group)

    def recorded_parts(self) -> list[int]:
        prompts = [Prompt(place, [place], "") for place in range(self.update.groups)]
        batch = RolloutBatch.of(1, 1, prompts, [Completion([1], [-1.0], True, "")] * len(prompts))
        parts: list[int] = self.update.recorded_in(batch).parts.tolist()
        return parts

    def end_part(self) -> None:
        for name in self.update.pending():
            self.update.serve(name)


def test_parts_follow_each_other_and_the_last_is_left_to_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(16, monkeypatch)
    policy.take(9)
    assert policy.parts == [], "an eighth of the groups is a part"
    policy.take(3, 12, 4, 0)
    assert policy.parts == [[3, 9]], "the policy is busy"
    policy.update.serve("policy-0")
    assert len(policy.parts) == 1, "one of its ranks is busy"
    policy.end_part()
    assert policy.parts == [[3, 9], [0, 4, 12]]
    policy.take(*{*range(16)} - {0, 3, 4, 9, 12})
    policy.end_part()
    assert len(policy.parts) == 2, "all groups are complete"
    assert policy.update.pending() == {}
    assert policy.recorded_parts() == [1, 2, 2, 0, 1, 2, 2, 2, 2, 0, 2, 2, 1, 2, 2, 2]


def test_a_group_without_rewards_is_not_in_a_part_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(8, monkeypatch)
    policy.take(5, is_scored=False)
    assert policy.parts == []
    policy.take(2)
    assert policy.parts == [[2]]
    assert policy.recorded_parts() == [1, 1, 0, 1, 1, 1, 1, 1]


def test_no_part_follows_one_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(8, monkeypatch)
    policy.take(5, 6)
    policy.failure = DeviceOutOfMemory("")
    policy.end_part()
    policy.take(1)
    assert (policy.parts, policy.update.pending()) == ([[5]], {})
    assert policy.update.adding.keys() == {"policy-0", "policy-1"}, "the update waits for it, and raises its failure"
