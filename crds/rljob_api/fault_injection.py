"""Failures on purpose, by which people see how their own set-up recovers."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from rljob_api.api_model import ApiModel, Rule

FaultClass = Literal[
    "Fragmentation",
    "AllocatorCache",
    "ActivationSpike",
    "KVCacheOversized",
    "WeightSyncSpike",
    "OptimizerState",
    "HostMemory",
    "SharedMemory",
    "WorkerLost",
]
"""What goes wrong: the classes that a diagnosis knows and that a process can be brought into, and a lost process."""

FaultPhase = Literal["load", "rollout", "update", "optimizer", "sync", "checkpoint"]
"""When: while the roles start, in a phase of the step, or (`optimizer`) in the update with the parameters changed."""

_MAX_FAULTS = 32
_FAULT = re.compile(r"(?P<class>\w+)@(?P<phase>\w+):(?P<step>\d+)(x(?P<times>\d+))?")


class Fault(ApiModel):
    """One failure on purpose."""

    fault_class: FaultClass = Field(alias="class")
    """What goes wrong."""

    phase: FaultPhase
    """When it goes wrong. load: while the roles start. optimizer: in the update, with the parameters changed."""

    step: int = Field(ge=1)
    """The step in which it goes wrong; for load, the step that comes next."""

    times: int = Field(default=1, ge=1, le=100)
    """How often, each time the phase is tried again."""

    rank: int = Field(default=0, ge=0)
    """Number of the process within its role."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """A fault from `CLASS@PHASE:STEP[xTIMES]`. Raises ValueError, pydantic's `ValidationError` among them."""
        match = _FAULT.fullmatch(text)
        if match is None:
            raise ValueError(f"expected CLASS@PHASE:STEP[xTIMES], such as ActivationSpike@update:3x2, found {text!r}")
        return cls(
            fault_class=match["class"],  # type: ignore[arg-type]  # pydantic checks it
            phase=match["phase"],  # type: ignore[arg-type]
            step=int(match["step"]),
            times=int(match["times"] or 1),
        )


class FaultInjection(ApiModel):
    """Failures on purpose. Off, unless it is said twice: `enabled`, and a fault."""

    enabled: bool = False
    """Whether the job may be made to fail."""

    faults: Annotated[list[Fault], Field(max_length=_MAX_FAULTS)] = Field(
        default_factory=list, json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    """What goes wrong, and when."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.enabled || !has(self.faults) || size(self.faults) == 0",
            holds=lambda injection: injection.enabled or not injection.faults,
            field="faults",
            message="faults make the job fail on purpose: write enabled: true beside them, or remove them",
        ),
    )
