"""A rollout engine as a role: it also keeps the memory log of its process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout.engine import RolloutEngine
from rljob_trainer.rollouts import Completion
from rljob_trainer.telemetry.memory import MemoryLog, MemorySample


class RolloutActor(RolloutEngine):
    """What a rollout process holds: the engine and its memory log."""

    def __init__(self, rank: int, config: RolloutConfig, output_dir: Path) -> None:
        # Takes many seconds: here they pass while the policy's processes import their own libraries.
        import vllm  # noqa: F401

        super().__init__(rank, config)
        self._memory_log = MemoryLog(output_dir / "memory" / f"rollout-{rank}.jsonl", config.device)

    def generate_for_step(
        self, step: int, prompts: Sequence[Sequence[int]], group_size: int, seeds: Sequence[int]
    ) -> tuple[list[Completion], MemorySample]:
        """The completions of `generate`, and this process's memory with the peaks of generating them."""
        self._memory_log.begin_phase()
        completions = self.generate(prompts, group_size, seeds)
        return completions, self._memory_log.record(step, "rollout")
