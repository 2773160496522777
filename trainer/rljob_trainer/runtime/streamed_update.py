"""An update that begins while groups of its step are still generated.

Gradients are linear in the normalizer of the loss: they are added up without it, and divided once it is known. The
policy takes the groups that are complete and scored, a part after the other, and the rest when all are. Nothing changes
before the rollouts of the step are in the journal, which also has the parts: a replay adds them up in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rljob_api.algorithms import ALGORITHMS
from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput, RunError
from rljob_trainer.algorithms.advantages import OF_GROUPS
from rljob_trainer.roles.calls import Calls, result_of
from rljob_trainer.roles.roles import Roles
from rljob_trainer.rollout_batch import RolloutBatch
from rljob_trainer.runtime.step_rollouts import CompleteGroup, GeneratedRollouts
from rljob_trainer.tasks.scoring import JoinedRewards

VARIABLE = "RLJOB_STREAM_UPDATES"
"""Environment variable of the controller: 1 streams updates also where that is not the default, 0 nowhere."""

_PARTS = 8
"""Most parts of a step, nearly: small ones fill micro-batches badly, large ones leave more to the end."""


def obstacle_to_streaming(spec: RLJobSpec, roles: Roles, wanted: str | None) -> str | None:
    """The reason why updates do not begin before all groups are complete; None if they do.

    `wanted`: the value of `RLJOB_STREAM_UPDATES`.
    """
    settings = roles.settings
    at_once = settings.rollout.max_num_seqs * roles.engine_count
    algorithm = spec.algorithm
    obstacles = {
        "each step has one group": algorithm.prompts_per_step < 2,
        "the responses of a step are divided over several updates": algorithm.updates_per_step > 1,
        "the policy already learns while the next step is generated": algorithm.max_staleness > 0,
        "the groups of a step are chosen when all are scored": algorithm.dynamic_sampling is not None,
        "advantages may depend on all groups": algorithm.advantage is not None
        or ALGORITHMS[algorithm.name].advantage not in OF_GROUPS,
        "the engines sleep while the policy learns": roles.engines_sleep,
        f"{VARIABLE} is 0": wanted == "0",
        "policy and engines have no GPUs of their own": wanted != "1"
        and not (settings.policy.device == "cuda" and spec.topology == "Disaggregated"),
        "all responses end at the same time": wanted != "1"
        and algorithm.ignore_end_of_sequence
        and algorithm.prompts_per_step * algorithm.group_size <= at_once,
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)


def chosen_by_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """The value of `RLJOB_STREAM_UPDATES`. Raises `BadInput` for another one than 0 and 1."""
    wanted = environment.get(VARIABLE) or None
    if wanted not in (None, "0", "1"):
        raise BadInput(f"expected 0 or 1 in {VARIABLE}, found {wanted}; remove it for the default")
    return wanted


@dataclass(slots=True)
class StreamedUpdate:
    """The update of a step whose groups are being generated. It is served while the controller waits for them."""

    groups: int
    """Groups of the step."""
    score: Callable[[GeneratedRollouts], RolloutBatch]
    """Returns the scored batch of some groups, whose rewards are known."""
    add_part: Callable[[RolloutBatch, int], Calls]
    """Begins to add a part, given the number of those before."""
    adding: Calls = field(default_factory=dict, init=False)
    """The calls of the last part."""
    added: list[list[int]] = field(default_factory=list, init=False)
    """Places of the groups of each part that was begun."""
    _arrived: set[str] = field(default_factory=set, init=False)
    """Names of the calls that have ended."""
    _complete: list[CompleteGroup] = field(default_factory=list, init=False)
    """Groups that are in no part yet."""
    _stopped: bool = field(default=False, init=False)
    """No part is added any more, after a failure, which a later phase repeats."""

    def take(self, group: CompleteGroup) -> None:
        """Take a group that is complete, and may be scored later."""
        self._complete.append(group)
        self._advance()

    def recorded_in(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch of the whole step with its parts, of which the groups that are in none yet are the last."""
        parts = np.full(self.groups, len(self.added), np.int32)
        for part, places in enumerate(self.added):
            parts[places] = part
        share = float((parts < len(self.added)).mean())
        return replace(batch, parts=parts, metrics=batch.metrics | {"streamed_groups": share})

    def pending(self) -> Calls:
        """See `calls.Served`."""
        return {} if self._stopped else {name: call for name, call in self.adding.items() if name not in self._arrived}

    def serve(self, name: str) -> None:
        """See `calls.Served`."""
        try:
            result_of(self.adding[name], name, "updating")
        except RunError:
            self._stopped = True
            return
        self._arrived.add(name)
        self._advance()

    def _advance(self) -> None:
        """Begin the next part if the policy is free and enough groups are scored. The last part is left to the
        update."""
        least, left = -(-self.groups // _PARTS), self.groups - sum(map(len, self.added))
        if self._stopped or self.pending() or len(self._complete) < least:
            return
        known = [(group, rewards) for group in self._complete if (rewards := group.rewards()) is not None]
        if not least <= len(known) < left:
            return
        known.sort(key=lambda each: each[0].place)
        chosen = [group for group, _ in known]
        generated = GeneratedRollouts(
            prompts=[group.prompt for group in chosen],
            completions=[completion for group in chosen for completion in group.completions],
            rewards=JoinedRewards([rewards for _, rewards in known]),
            memory={},
        )
        try:
            self.adding, self._arrived = self.add_part(self.score(generated), len(self.added)), set()
        except RunError:
            self._stopped = True
            return
        self.added.append([group.place for group in chosen])
        self._complete = [group for group in self._complete if group.place not in self.added[-1]]
