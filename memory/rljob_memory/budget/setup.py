"""Everything that a job's budget depends on, except for the memory plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_memory.budget.lines import PHASES, Budget, Phase, Pod
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import ModelShape
from rljob_memory.workload import Workload

USABLE_SHARE = 0.9
"""Share of a GPU's memory that is planned with; the rest is for fragmentation and errors of the budget."""

_EXACT_PHASES: frozenset[Phase] = frozenset({"sync"})
"""Phases of well-known sizes, weights and buckets, which may fill a GPU."""


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

    def missing_bytes(self, predicted: Budget) -> int:
        """Memory that a GPU lacks, in the phase that lacks most; 0 if the budget fits, or without GPUs."""
        if self.hardware.device == "cpu":
            return 0
        lacks = (
            predicted.total("gpu", phase, pod=pod) - self.usable_bytes(phase, pod)
            for pod in predicted.pods()
            for phase in PHASES
        )
        return max(0, *lacks)

    def with_work(self, **changes: object) -> Setup:
        """The setup of a job whose workload differs in `changes`."""
        return replace(self, work=replace(self.work, **changes))  # type: ignore[arg-type]
