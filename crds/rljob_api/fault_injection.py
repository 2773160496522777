"""Faults that are injected on purpose, to test how a job recovers."""

from __future__ import annotations

import re
from typing import ClassVar, Literal, Self

from pydantic import Field

from rljob_api.api_model import ATOMIC, ApiModel, Rule

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
    "Hang",
    "Leak",
]
"""Classes of faults: failure classes of the diagnosis that RLJob can cause on purpose, a lost process, one that hangs,
and one whose memory grows."""

FaultPhase = Literal["load", "rollout", "update", "optimizer", "sync", "checkpoint"]
"""Points of injection: while the roles start, in a phase of the step, or (`optimizer`) in the update after the
parameters changed."""

_MAX_FAULTS = 32
_FAULT = re.compile(r"(?P<class>\w+)@(?P<phase>\w+):(?P<step>\d+)(x(?P<times>\d+))?")


class Fault(ApiModel):
    """A fault to inject."""

    fault_class: FaultClass = Field(alias="class")
    """Class of the fault."""

    phase: FaultPhase
    """Point of injection. load: while the roles start. optimizer: in the update, after the parameters changed. The
    others are phases of the step."""

    step: int = Field(ge=1)
    """Step of the injection. For load, the next step."""

    times: int = Field(default=1, ge=1, le=100)
    """Number of injections. The fault is injected again whenever the phase is retried."""

    rank: int = Field(default=0, ge=0)
    """Number of the process within its role, from 0."""

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
    """Faults to inject. They require both `enabled: true` and an entry in `faults`."""

    enabled: bool = False
    """If true, RLJob injects the faults."""

    faults: list[Fault] = Field(default_factory=list, max_length=_MAX_FAULTS, json_schema_extra=ATOMIC)
    """Faults to inject."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.faults) || size(self.faults) == 0 || self.enabled",
            holds=lambda injection: injection.enabled or not injection.faults,
            field="faults",
            message="faults make the job fail on purpose: also write enabled: true, or remove them",
        ),
    )
