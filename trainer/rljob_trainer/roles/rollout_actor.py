"""A rollout engine as a role: it also writes the memory log of its process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rljob_trainer.hardware import gpus_beginning_with
from rljob_trainer.roles.actor import long_imports
from rljob_trainer.rollout.config import SEES_ALL_GPUS, RolloutConfig
from rljob_trainer.rollout.engine import RolloutEngine
from rljob_trainer.rollout.lots import EngineWork, Generated, WholeGroups
from rljob_trainer.rollout.topology_engines import ColocatedEngine, DisaggregatedEngine
from rljob_trainer.telemetry.memory import MemoryLog
from rljob_trainer.telemetry.out_of_memory import attach_out_of_memory_observer


class RolloutActor(RolloutEngine):
    """The object of a rollout process, with its engine and memory log: the part that all topologies share."""

    def __init__(self, rank: int, config: RolloutConfig, output_dir: Path) -> None:
        put_own_gpu_first()
        # Takes seconds, in which the policy's processes import their libraries.
        import vllm  # noqa: F401

        super().__init__(rank, config)
        self._memory_log = MemoryLog(output_dir / "memory" / f"rollout-{rank}.jsonl", config.device)
        self._oom_directory = output_dir / "oom"
        self._step = 0
        self._generation: int | None = None

    def import_engine(self) -> None:
        with long_imports():
            super().import_engine()

    def start(self, store_port: int = 0) -> None:
        self._memory_log.begin_phase(self._step, "load")
        if self._config.device == "cuda":
            attach_out_of_memory_observer(self._oom_directory, "rollout", self.rank, lambda: self._memory_log.progress)
        super().start(store_port)
        self._memory_log.record(self._step, "load")

    def generate_for_step(self, step: int, generation: int, work: EngineWork, sequences_left: int) -> Generated:
        """Begin `work`, and return the groups that are complete, including those of earlier calls. `generation`:
        incomplete work of any other generation is dropped. `sequences_left`: as in `generate_groups`.
        """
        self._step = step
        if generation != self._generation:
            self.begin_generation()
            self._generation = generation
        if not self.unfinished_sequences:
            self._memory_log.begin_phase(step, "rollout")
        results: list[tuple[int, Any]]
        if isinstance(work, WholeGroups):
            results = self.generate_groups(work, sequences_left)
        else:
            # All processes of an engine complete its lots; the first one returns them.
            results = list(zip(work.places, self.generate_lots(work.lots), strict=self.shard.is_first))
        left = self.unfinished_sequences
        return Generated(results, left, None if left else self._memory_log.record(step, "rollout"))

    # --- memory while it receives weights ---

    def start_weight_update(self) -> None:
        self._memory_log.begin_phase(self._step, "sync")
        super().start_weight_update()

    def finish_weight_update(self, version: int) -> None:
        super().finish_weight_update(version)
        self._memory_log.record(self._step, "sync")

    # --- injected faults ---

    def begin_phase(self, phase: str) -> None:
        """Attribute the next failure to `phase`, as if the phase itself had failed."""
        self._memory_log.begin_phase(self._step, phase)

    def fail(self, fail: Callable[[], NoReturn]) -> None:
        """Call `fail`."""
        fail()


class ColocatedRolloutActor(RolloutActor, ColocatedEngine):
    """An engine that shares its GPU with a policy rank."""

    def sleep(self) -> None:
        with self._memory_log.behind_torch():
            super().sleep()
        self._memory_log.record(self._step, "update")

    def wake_weights(self) -> None:
        with self._memory_log.behind_torch():
            super().wake_weights()

    def wake_kv_cache(self) -> None:
        with self._memory_log.behind_torch():
            super().wake_kv_cache()


class DisaggregatedRolloutActor(RolloutActor, DisaggregatedEngine):
    """An engine with its own GPUs."""


def put_own_gpu_first() -> None:
    """Let CUDA call the GPU that Ray has assigned 0, if this process sees others as well. Call it before any library
    uses CUDA."""
    if SEES_ALL_GPUS in os.environ:
        import ray

        [own] = ray.get_gpu_ids()
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus_beginning_with(str(own))
