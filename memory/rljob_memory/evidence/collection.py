"""Gathers what the readers find, bounded however much they find, until it becomes the evidence."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.evidence.device_memory import GpuProcess
from rljob_memory.evidence.evidence import EngineRecord, Evidence, MemorySample, MemorySeries
from rljob_memory.evidence.failure import Failure, first_failure

_MOST_FAILURES_KEPT = 512
_MOST_SERIES = 256
_MOST_SAMPLES = 1_024
_MOST_PROCESSES = 256


@dataclass(slots=True)
class Collection:
    """What was found so far."""

    failures: list[Failure] = field(default_factory=list)
    failure_count: int = 0
    secondary: Counter[str] = field(default_factory=Counter)
    series: dict[str, deque[MemorySample]] = field(default_factory=dict)
    engine: EngineRecord = field(default_factory=EngineRecord)
    gpu_processes: dict[int, list[GpuProcess]] = field(default_factory=dict)
    barrier_on_gpu_0: bool = False
    plan: MemoryPlan | None = None
    versions: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def add_failure(self, failure: Failure) -> None:
        """The first ones are kept: what comes after hundreds of messages explains nothing."""
        self.failure_count += 1
        if len(self.failures) < _MOST_FAILURES_KEPT:
            self.failures.append(failure)

    def add_sample(self, name: str, sample: MemorySample) -> None:
        """The latest ones are kept: they are nearest to the failure."""
        if name in self.series or len(self.series) < _MOST_SERIES:
            self.series.setdefault(name, deque(maxlen=_MOST_SAMPLES)).append(sample)

    def add_gpu_process(self, gpu: int, process: GpuProcess) -> None:
        processes = self.gpu_processes.setdefault(gpu, [])
        if len(processes) < _MOST_PROCESSES and process.pid not in {known.pid for known in processes}:
            processes.append(process)

    def evidence(self) -> Evidence:
        return Evidence(
            failure=first_failure(self.failures),
            failures=self.failure_count,
            secondary=dict(self.secondary),
            series=tuple(MemorySeries(name, tuple(samples)) for name, samples in self.series.items()),
            engine=self.engine,
            gpu_processes={gpu: tuple(processes) for gpu, processes in self.gpu_processes.items()},
            barrier_on_gpu_0=self.barrier_on_gpu_0,
            plan=self.plan,
            versions=dict(self.versions),
            names=tuple(self.names),
        )
