"""A rollout engine as a role: it also writes the memory log of its process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rljob_memory.sample import MemorySample
from rljob_trainer.roles.actor import long_imports
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout.engine import RolloutEngine
from rljob_trainer.rollout_batch import Completion
from rljob_trainer.telemetry.memory import MemoryLog
from rljob_trainer.telemetry.out_of_memory import attach_out_of_memory_observer


class RolloutActor(RolloutEngine):
    """The object of a rollout process: the engine, with its memory log."""

    def __init__(self, rank: int, config: RolloutConfig, output_dir: Path) -> None:
        # Takes seconds, in which the policy's processes import their libraries.
        import vllm  # noqa: F401

        super().__init__(rank, config)
        self._memory_log = MemoryLog(output_dir / "memory" / f"rollout-{rank}.jsonl", config.device)
        self._oom_directory = output_dir / "oom"
        self._step = 0

    def import_engine(self) -> None:
        with long_imports():
            super().import_engine()

    def start(self) -> None:
        self._memory_log.begin_phase(self._step, "load")
        if self._config.device == "cuda":
            attach_out_of_memory_observer(self._oom_directory, "rollout", self.rank, lambda: self._memory_log.progress)
        super().start()
        self._memory_log.record(self._step, "load")

    def generate_for_step(
        self, step: int, prompts: Sequence[Sequence[int]], group_size: int, seeds: Sequence[int]
    ) -> tuple[list[Completion], MemorySample]:
        """The completions of `generate`, and the memory of this process, with the peaks during generation."""
        self._step = step
        self._memory_log.begin_phase(step, "rollout")
        completions = self.generate(prompts, group_size, seeds)
        return completions, self._memory_log.record(step, "rollout")

    # --- memory while the engine sleeps, and while it receives weights ---

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

    def start_weight_update(self) -> None:
        self._memory_log.begin_phase(self._step, "sync")
        super().start_weight_update()

    def finish_weight_update(self, version: int) -> None:
        super().finish_weight_update(version)
        self._memory_log.record(self._step, "sync")

    # --- injected faults ---

    def begin_phase(self, phase: str) -> None:
        """Attribute the failure that follows to `phase`, as if the phase had failed by itself."""
        self._memory_log.begin_phase(self._step, phase)
