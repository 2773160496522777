"""What the rules ask of the evidence."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_memory.estimate import GIB
from rljob_memory.evidence.device_memory import DeviceMemory
from rljob_memory.evidence.evidence import Evidence
from rljob_memory.evidence.failure import Failure, FailureKind

_LEAST_FOREIGN_BYTES = GIB
_LEAST_FOREIGN_SHARE = 0.05
"""Below these, what is neither free nor the process's own is the driver's: 0.3–0.6 GiB on cards of 24–180 GiB."""
_OWN_BESIDE_TORCH_BYTES = GIB
"""Context, NCCL and libraries of the process itself, where the message tells only of torch."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The first failure and all that is known around it."""

    evidence: Evidence
    failure: Failure

    @property
    def device(self) -> DeviceMemory | None:
        """The numbers of the GPU, where the message of torch's allocator gave any."""
        return self.failure.device if self.failure.kind is FailureKind.ALLOCATOR else None

    @property
    def foreign_bytes(self) -> int:
        """What others hold on the GPU, where it is more than the driver's own."""
        device = self.device
        if device is None or device.total_bytes is None:
            return 0
        least = max(_LEAST_FOREIGN_BYTES, round(_LEAST_FOREIGN_SHARE * device.total_bytes))
        if device.process_bytes is None:
            least += _OWN_BESIDE_TORCH_BYTES
        return device.foreign_bytes if device.foreign_bytes >= least else 0

    @property
    def engine_holds_little(self) -> bool:
        """Whether RLJob's own engine was asleep at the time, as the plan says, or not yet started."""
        plan, failure = self.evidence.plan, self.failure
        return (
            plan is not None
            and plan.rollout_sleep_level > 0
            and failure.role == "policy"
            and failure.phase in (None, "load", "update")
        )

    @property
    def policy_cache_bytes(self) -> int | None:
        """Reserved but in no tensor, in the policy process that has most of it, when it was last seen."""
        caches = [
            cache
            for series in self.evidence.series
            if series.is_policy and (cache := series.samples[-1].cache_bytes) is not None
        ]
        return max(caches, default=None)

    @property
    def policy_reserved_bytes(self) -> int:
        """What torch held in the policy process that has most, when it was last seen; 0 where none was."""
        held = [
            series.samples[-1].reserved_bytes or series.samples[-1].allocated_bytes
            for series in self.evidence.series
            if series.is_policy
        ]
        return max(held, default=0)

    def numbers(self) -> dict[str, int]:
        """What the first failure's message named."""
        failure = self.failure
        named = {"rank": failure.rank, "step": failure.step, "micro_batch": failure.micro_batch}
        numbers = {name: value for name, value in named.items() if value is not None}
        numbers.update(failure.sizes)
        if failure.device:
            numbers.update(failure.device.numbers())
            if failure.device.gpu is not None:
                numbers["gpu"] = failure.device.gpu
        numbers["failures"] = self.evidence.failures
        return numbers


def place_of(failure: Failure) -> str:
    """` (policy rank 3, step 12, update)`: as much of it as is known."""
    process = " ".join(
        part for part in (failure.role, f"rank {failure.rank}" if failure.rank is not None else None) if part
    )
    step = f"step {failure.step}" if failure.step is not None else ""
    micro_batch = f"micro-batch {failure.micro_batch}" if failure.micro_batch is not None else ""
    during = f"during {failure.activity}" if failure.activity else failure.phase or ""
    parts = [part for part in (process, step, micro_batch, during) if part]
    return f" ({', '.join(parts)})" if parts else ""
