"""Everything that was seen around a failure. Bytes, unless a name says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.evidence.device_memory import GpuProcess
from rljob_memory.evidence.failure import Failure
from rljob_memory.sample import MemorySample


@dataclass(frozen=True, slots=True)
class MemorySeries:
    """Samples of one process in the order they were taken. `name`: `policy-0`, or what a foreign log calls it."""

    name: str
    samples: tuple[MemorySample, ...]

    @property
    def is_policy(self) -> bool:
        """Whether these can be a trained model's: whatever is not named an engine's or the controller's."""
        return not self.name.startswith(("rollout", "controller"))


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What a vLLM engine told of itself. `seen`: whether there was one in the log at all.

    `freed`, `still_in_use`: of its last sleep; the second counts every process on the device.
    """

    seen: bool = False
    asleep: bool = False
    freed_bytes: int | None = None
    still_in_use_bytes: int | None = None
    kv_cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """`failure`: the first one of the last attempt that failed; the others follow from it. None where none failed.

    `failures`: how many messages there were, of all attempts. `secondary`: what follows from a failure elsewhere,
    counted by name. `gpu_processes`: of a process table, by GPU. `names`: files that were read.
    """

    failure: Failure | None = None
    failures: int = 0
    secondary: Mapping[str, int] = field(default_factory=dict)
    series: tuple[MemorySeries, ...] = ()
    engine: EngineRecord = EngineRecord()
    gpu_processes: Mapping[int, tuple[GpuProcess, ...]] = field(default_factory=dict)
    barrier_on_gpu_0: bool = False
    host: MemorySample = field(default_factory=MemorySample)
    plan: MemoryPlan | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
