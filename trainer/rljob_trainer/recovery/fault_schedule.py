"""Which of the faults that a job is to have are due, and that none is given once too often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rljob_api.fault_injection import Fault, FaultPhase
from rljob_api.plan_change import Phase
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.ledger.records import FaultRecord, fault_records
from rljob_trainer.roles.colocated import ColocatedRoles
from rljob_trainer.roles.faults import ArmedFault, struck_role

_FAULT_PHASES: dict[Phase | None, tuple[FaultPhase, ...]] = {
    None: ("load",),
    "rollout": ("rollout",),
    "reward": (),
    "update": ("update", "optimizer"),
    "sync": ("sync",),
    "checkpoint": (),
}


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """Gives the job's faults to the processes that they happen in. The ledger counts those that were given."""

    faults: Sequence[Fault]
    ledger: Ledger
    roles: ColocatedRoles
    tell: Callable[[str], None]

    def arm(self, step: int, phase: Phase | None) -> None:
        """Before `phase` of `step` (None: before the roles load): make it fail, where a fault is due."""
        self._arm_those_of(step, _FAULT_PHASES[phase])

    def arm_checkpoint(self, step: int) -> None:
        """Before the checkpoint of `step` is begun, which not every phase `checkpoint` does: make that fail."""
        self._arm_those_of(step, ("checkpoint",))

    def _arm_those_of(self, step: int, phases: Sequence[FaultPhase]) -> None:
        for fault in self.faults:
            if fault.phase in phases and fault.step <= step and self._given(fault) < fault.times:
                self._arm(fault)

    def _arm(self, fault: Fault) -> None:
        processes = self.roles.policy if struck_role(fault) == "policy" else self.roles.engines
        if (fault.phase == "load" and processes.loading) or fault.rank >= len(processes):
            return
        self.ledger.record(
            FaultRecord(
                attempt=len(self.ledger.attempts),
                fault_class=fault.fault_class,
                phase=fault.phase,
                step=fault.step,
                rank=fault.rank,
            )
        )
        self.tell(f"a fault on purpose: {fault.fault_class} in {fault.phase}, {processes.role} rank {fault.rank}")
        processes.arm(fault.rank, ArmedFault.of(fault, self.roles.settings.policy.device))

    def _given(self, fault: Fault) -> int:
        return sum(
            (record.fault_class, record.phase, record.step, record.rank)
            == (fault.fault_class, fault.phase, fault.step, fault.rank)
            for record in fault_records(self.ledger.records)
        )
