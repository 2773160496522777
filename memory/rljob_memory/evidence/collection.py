"""Gathers what the readers find, bounded however much they find, until it becomes the evidence."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.evidence.device_memory import GpuProcess
from rljob_memory.evidence.evidence import EngineRecord, Evidence, MemorySeries
from rljob_memory.evidence.failure import Failure
from rljob_memory.evidence.first_failure import failure_to_explain
from rljob_memory.evidence.host import merged
from rljob_memory.sample import MemorySample

_MOST_FAILURES_KEPT = 512
_MOST_SERIES = 256
_MOST_SAMPLES = 1_024
_MOST_SNAPSHOTS = 512
_MOST_RESTARTS = 4_096
_MOST_LIVES = 4
"""Processes of the same name, one after the other, whose samples are kept."""
_MOST_PROCESSES = 256


@dataclass(slots=True)
class Collection:
    """What was found so far."""

    failures: list[Failure] = field(default_factory=list)
    failure_count: int = 0
    secondary: Counter[str] = field(default_factory=Counter)
    snapshots: deque[Failure] = field(default_factory=lambda: deque(maxlen=_MOST_SNAPSHOTS))
    restarts: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_RESTARTS))
    series: dict[str, deque[deque[MemorySample]]] = field(default_factory=dict)
    engine: EngineRecord = field(default_factory=EngineRecord)
    gpu_processes: dict[int, list[GpuProcess]] = field(default_factory=dict)
    barrier_on_gpu_0: bool = False
    host: MemorySample = field(default_factory=MemorySample)
    plan: MemoryPlan | None = None
    versions: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def add_failure(self, failure: Failure) -> None:
        """The first ones are kept: what comes after hundreds of messages explains nothing."""
        self.failure_count += 1
        if len(self.failures) < _MOST_FAILURES_KEPT:
            self.failures.append(failure)

    def add_snapshot(self, failure: Failure) -> None:
        """A failure that its process wrote down when it happened."""
        self.snapshots.append(failure)

    def add_restart(self, time: float) -> None:
        """The job began, or went on after a failure, at `time` (seconds since the epoch)."""
        self.restarts.append(time)

    def begin_series(self, name: str) -> None:
        """What follows under this name is of another process than what came before."""
        if name in self.series or len(self.series) < _MOST_SERIES:
            self.series.setdefault(name, deque(maxlen=_MOST_LIVES)).append(deque(maxlen=_MOST_SAMPLES))

    def add_sample(self, name: str, sample: MemorySample) -> None:
        """The latest ones are kept: they are nearest to the failure."""
        if name not in self.series:
            self.begin_series(name)
        if name in self.series:
            self.series[name][-1].append(sample)

    def add_host(self, host: MemorySample) -> None:
        self.host = merged(self.host, host)

    def add_gpu_process(self, gpu: int, process: GpuProcess) -> None:
        processes = self.gpu_processes.setdefault(gpu, [])
        if len(processes) < _MOST_PROCESSES and process.pid not in {known.pid for known in processes}:
            processes.append(process)

    def evidence(self) -> Evidence:
        failure = failure_to_explain(self.failures, self.snapshots, self.restarts)
        return Evidence(
            failure=failure,
            failures=self.failure_count or len(self.snapshots),
            secondary=dict(self.secondary),
            series=tuple(
                MemorySeries(name, samples)
                for name, lives in self.series.items()
                if (samples := _samples_before(lives, failure))
            ),
            engine=self.engine,
            gpu_processes={gpu: tuple(processes) for gpu, processes in self.gpu_processes.items()},
            barrier_on_gpu_0=self.barrier_on_gpu_0,
            host=self.host,
            plan=self.plan,
            versions=dict(self.versions),
            names=tuple(self.names),
        )


def _samples_before(lives: Sequence[Sequence[MemorySample]], failure: Failure | None) -> tuple[MemorySample, ...]:
    """Of the process that ran when it failed; of the last one where the time is not known."""
    if failure is None or failure.clock is None or failure.clock[0] != "epoch":
        return tuple(lives[-1])
    failed_at = failure.clock[1]
    for samples in reversed(lives):
        before = tuple(sample for sample in samples if sample.time is None or sample.time <= failed_at)
        if before:
            return before
    return ()
