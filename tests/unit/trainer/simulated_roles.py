"""Roles without processes. Their weights are the history of updates, and any call can be made to fail."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from rljob_api.plan_change import Role
from rljob_client.errors import RunError
from rljob_memory.sample import MemorySample
from rljob_trainer.errors import DeviceOutOfMemory, WorkerLost
from rljob_trainer.ledger.checkpoint_manifest import FileDigest
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.config import UpdateResult
from rljob_trainer.roles.actor import known_failure
from rljob_trainer.roles.faults import InjectedFault
from rljob_trainer.roles.generation import WorkQueue
from rljob_trainer.rollout.lots import EngineWork, Segment, WholeGroups, generate_lot
from rljob_trainer.rollout_batch import Completion, RolloutBatch

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 79.00 GiB memory in use. Of the allocated memory 76.00 GiB "
    "is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def out_of_memory(actor: str, message: str = OUT_OF_MEMORY) -> RunError:
    """The failure of a process, as the controller receives it."""
    known = known_failure(OutOfMemoryError(message))
    assert isinstance(known, DeviceOutOfMemory)
    return known.of(actor)


WHOLE, HALFWAY, DEAD = "before the weights were touched", "with the weights half-written", "dead"
START = "the weights that it begins with"


def learnt(weights: str, batch: RolloutBatch) -> str:
    """The weights after an update, which depend on all earlier updates and on every number of the batch."""
    content = b"".join(
        part.tobytes()
        for part in (*batch.response_ids, *batch.token_versions, batch.rewards, batch.advantages, batch.parts)
    )
    return hashlib.sha256(f"{weights}/{batch.step}".encode() + content).hexdigest()


MAX_TOKENS = 16


def drawn(seed: str, max_tokens: int) -> Completion:
    """Tokens that depend on `seed`; each of them ends the response with a probability of 1/8."""
    digest = hashlib.sha256(seed.encode()).digest()[:max_tokens]
    length = next((n for n, token in enumerate(digest, start=1) if token % 8 == 0), 0)
    ids = list(digest[: length or max_tokens])
    return Completion(ids, [-token / 256 for token in ids], length > 0, "")


@dataclass
class SimulatedProcesses:
    role: Role
    ranks: int
    started: bool = False
    loaded: bool = False
    scattered: bool = False
    loading: dict[str, object] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Calls in which a fault was injected."""

    def __len__(self) -> int:
        return self.ranks

    def inject(self, _rank: int, fault: InjectedFault) -> None:
        self.faults.append(fault.method)


@dataclass
class SimulatedGeneration:
    finish: Callable[[], tuple[list[Any], dict[str, MemorySample]]]

    def pending(self) -> dict[str, Any]:
        return {}

    def serve(self, name: str) -> None:
        raise AssertionError(f"expected no call to {name}")


class SimulatedRoles:
    """Has the interface of `ColocatedRoles`.

    `failures`: kind of failure by call, given as a number or as in `update 3`. `later`: the same, after one has failed.
    """

    cut_members: Container[int] = ()
    """Responses of each group that are cut at the token limit, by their number."""

    def __init__(self, failures: Mapping[Any, str], ranks: int = 1) -> None:
        self.failures = dict(failures)
        self.later: dict[str, str] = {}
        self.calls = 0
        self.policy_at: int | None = None
        self.engines_at: int | None = None
        self.engines_ended = 0
        self.clock = PartClock()
        self.policy = SimulatedProcesses("policy", ranks)
        self.engines = SimulatedProcesses("rollout", ranks)
        self.settings = SimpleNamespace(policy=SimpleNamespace(device="cpu"), rollout=SimpleNamespace(max_num_seqs=64))
        self.weights: str | None = None
        self.engine_weights: str | None = None
        self.half_written = False
        self.settings_in_force: list[object] = []
        self.updates: list[int] = []
        self.parts: list[RolloutBatch] = []
        """The parts of the next update that were added."""
        self.rejoined = 0
        self.damaged: set[int] = set()
        """Steps whose checkpoints turn out to be damaged while they are loaded."""

    # --- start, change and end ---

    engines_sleep = False
    ray_ended = False

    @property
    def up(self) -> bool:
        return self.policy.loaded and self.engines.loaded

    def construct(self) -> dict[str, int]:
        self.policy.started = self.engines.started = True
        return {}

    def load(self) -> None:
        if not self.policy.loaded:
            self._may_fail("policy-0", "load")
            self.policy.loaded, self.weights, self.policy_at, self.half_written = True, START, 0, False
        if not self.engines.loaded:
            self._may_fail("rollout-0", "start")
            self.engines.loaded = True

    def change(self, settings: object) -> None:
        self.settings_in_force.append(settings)

    def can_start(self) -> bool:
        return not self.ray_ended

    def rejoin_policy(self) -> None:
        self._may_fail("policy-0", "rejoin")
        self.rejoined += 1
        self.policy.scattered = self.half_written = False

    def end(self, role: Role) -> None:
        if role == "policy":
            self.policy.scattered = False
            self.policy.started = self.policy.loaded = False
            self.policy_at = self.weights = None
        else:
            self.engines.started = self.engines.loaded = False
            self.engines_at = self.engine_weights = None
            self.engines_ended += 1

    # --- the phases of a step ---

    engine_count = 1

    def generate(
        self,
        step: int,
        queue: WorkQueue,
        work: Callable[[Sequence[int]], EngineWork],
        on_result: Callable[[int, Any], None],
    ) -> SimulatedGeneration:
        assert self.engine_weights is not None, "an engine without weights was requested to generate"
        assert self.engines_at is not None
        weights, version, engines = self.engine_weights, self.engines_at, self.engines_ended
        items = work(range(len(queue)))

        def tokens(segments: Sequence[Segment]) -> list[Completion]:
            return [drawn(f"{weights}/{segment}", segment.max_tokens) for segment in segments]

        def group(seed: int, group_size: int) -> list[Completion]:
            digests = [hashlib.sha256(f"{weights}/{seed}/{member}".encode()).digest() for member in range(group_size)]
            cut = self.cut_members
            return [
                Completion(list(each[:4]), [-1.0] * 4, member not in cut, each.hex())
                for member, each in enumerate(digests)
            ]

        def finish() -> tuple[list[Any], dict[str, MemorySample]]:
            assert engines == self.engines_ended, "engines that were stopped were waited for"
            results: list[Any]
            if isinstance(items, WholeGroups):
                results = [group(seed, items.group_size) for seed in items.seeds]
            else:
                results = [generate_lot(lot, MAX_TOKENS, version, tokens) for lot in items.lots]
            for item in reversed(range(len(results))):  # in no particular order
                on_result(item, results[item])
                if item == len(results) // 2:
                    self._may_fail("rollout-0", f"generate {step}")
            return results, {}

        return SimulatedGeneration(finish)

    def add_part(self, batch: RolloutBatch, added: int) -> dict[str, Any]:
        assert added == len(self.parts), "a part was left out, or is from another step"
        assert self.policy_at == batch.step - 1, "a part was added to the gradient of other weights"
        self.parts.append(batch)
        return {}

    def drop_parts(self, adding: dict[str, Any]) -> None:
        assert adding == {}
        self.parts = []

    def update(
        self, batch: RolloutBatch, added: int = 0, adding: dict[str, Any] | None = None, /
    ) -> dict[str, UpdateResult]:
        assert self.weights is not None
        parts, self.parts = self.parts, []
        assert added == len(parts)
        for number, part in enumerate(parts):
            groups = np.flatnonzero(batch.parts == number)
            members = [group * batch.group_size + member for group in groups for member in range(batch.group_size)]
            assert [ids.tolist() for ids in part.response_ids] == [batch.response_ids[i].tolist() for i in members]
            assert part.advantages.tolist() == batch.advantages[members].tolist()
        assert not self.policy.scattered, "an update was done by ranks without a group"
        assert not self.half_written, "an update was done on parameters that were half-written"
        assert self.policy_at == batch.step - 1, "an update was left out or done twice"
        before, self.policy_at = self.policy_at, None
        try:
            self._may_fail("policy-0", f"update {batch.step}")
        except DeviceOutOfMemory as failure:
            self.half_written = HALFWAY in str(failure)
            self.policy.scattered = len(self.policy) > 1
            self.policy_at = before if self.policy.scattered or not self.half_written else None
            raise
        self.weights = learnt(self.weights, batch)
        self.policy_at = batch.step
        self.updates.append(batch.step)
        return {"policy-0": UpdateResult({"loss": 0.0}, MemorySample(), 0.1)}

    def sync(self, version: int) -> None:
        self.engines_at = self.engine_weights = None
        self._may_fail("policy-0" if self.calls % 2 else "rollout-0", f"sync {version}")
        assert self.policy_at == version
        self.engine_weights, self.engines_at = self.weights, version

    # --- checkpoints ---

    def start_checkpoint(self, directory: Path) -> None:
        self._may_fail("policy-0", "start checkpoint")
        assert not self.half_written
        (directory / "weights.json").write_text(json.dumps(self.weights))

    def checkpoint_written(self) -> bool:
        return True

    def finish_checkpoint(self) -> dict[str, FileDigest]:
        self._may_fail("policy-0", "finish checkpoint")
        return {}

    def load_checkpoint(self, directory: Path, step: int) -> str | None:
        self.policy_at = None
        self._may_fail("policy-0", "load checkpoint")
        self.half_written = True
        if step in self.damaged:
            return "__0_0.distcp is corrupt (its checksum differs)"
        self.weights, self.half_written = json.loads((directory / "weights.json").read_text()), False
        self.policy_at = step
        return None

    def export_pretrained(self, directory: Path) -> None:
        self._may_fail("policy-0", f"export {self.policy_at}")
        assert not self.half_written
        directory.mkdir()
        (directory / "weights").write_text(str(self.weights))

    # --- internals ---

    def _may_fail(self, actor: str, call: str) -> None:
        self.calls += 1
        how = self.failures.pop(self.calls, None) or self.failures.pop(call, None)
        if how is not None:
            self.failures |= self.later
            self.later = {}
        if how == DEAD:
            raise WorkerLost(f"{actor} died").of(actor)
        if how is not None:
            raise out_of_memory(actor, f"{OUT_OF_MEMORY} {how}")
