"""Everything that a job's budget depends on, except for the memory plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget.lines import PHASES, Budget, Phase, Pod
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.workload import Workload

USABLE_SHARE = 0.9
"""Share of a GPU's memory that is planned with; the rest is for fragmentation and errors of the budget."""

_EXACT_PHASES: frozenset[Phase] = frozenset({"sync"})
"""Phases of well-known sizes, weights and buckets, which may fill a GPU."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Memory that is missing in one phase."""

    place: Literal["gpu", "host"]
    pod: Pod
    phase: Phase
    needed_bytes: int
    usable_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.usable_bytes


@dataclass(frozen=True, slots=True)
class Setup:
    """Work, model and machine of a job."""

    work: Workload
    model: ModelShape
    hardware: Hardware

    def usable_bytes(self, phase: Phase, pod: Pod = "policy") -> int:
        """The part of a GPU's memory that a phase may use by the budget."""
        hardware = self.hardware
        size = hardware.device_memory_bytes
        if pod == "rollout":
            size = hardware.engine_device_memory_bytes or size
        return size if phase in _EXACT_PHASES else int(size * USABLE_SHARE)

    def gpu_lack(self, predicted: Budget) -> Lack | None:
        """The phase of a GPU that lacks most memory; None if the budget fits, or without GPUs."""
        if self.hardware.device == "cpu":
            return None
        needs = (
            Lack("gpu", pod, phase, predicted.total("gpu", phase, pod=pod), self.usable_bytes(phase, pod))
            for pod in predicted.pods()
            for phase in PHASES
        )
        worst = max(needs, key=lambda lack: lack.missing_bytes)
        return worst if worst.missing_bytes > 0 else None

    def missing_bytes(self, predicted: Budget) -> int:
        """Memory that a GPU lacks, in the phase that lacks most; 0 if the budget fits, or without GPUs."""
        lack = self.gpu_lack(predicted)
        return lack.missing_bytes if lack else 0

    def under(self, plan: MemoryPlan) -> Setup:
        """The setup with the copies of the policy's state that `plan` has, and its engines if it has chosen them."""
        work, size = self.work, plan.tensor_parallel_size
        if work.auto_engines and size != work.tensor_parallel_size:
            work = work.with_engines_of(size)
        if plan.policy_copies != work.policy_copies:
            work = replace(work, policy_copies=plan.policy_copies)
        return self if work is self.work else replace(self, work=work)

    def with_work(self, **changes: object) -> Setup:
        """The setup of a job whose workload differs in `changes`."""
        return replace(self, work=replace(self.work, **changes))  # type: ignore[arg-type]
