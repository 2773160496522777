"""Injects each fault of a job when it is due, at most as often as the job requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rljob_api.fault_injection import Fault, FaultPhase
from rljob_api.plan_change import Phase
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import FaultRecord, fault_records
from rljob_trainer.roles.faults import InjectedFault, target_role
from rljob_trainer.roles.role_processes import RoleProcesses
from rljob_trainer.roles.roles import Roles

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
    """Injects the faults of a job. The ledger counts the injected faults."""

    faults: Sequence[Fault]
    ledger: Ledger
    roles: Roles
    log: Callable[[str], None]

    def inject(self, step: int, phase: Phase | None) -> None:
        """Called before `phase` of `step` (None: before the roles load). Injects the first fault that is due."""
        self._inject_due(step, _FAULT_PHASES[phase])

    def inject_into_checkpoint(self, step: int) -> None:
        """Called before a checkpoint of `step` starts."""
        self._inject_due(step, ("checkpoint",))

    def _inject_due(self, step: int, phases: Sequence[FaultPhase]) -> None:
        """Inject one fault. Others wait until the phase is retried, since it may end the processes that they target."""
        for fault in self.faults:
            due = fault.phase in phases and fault.step <= step and self._times_injected(fault) < fault.times
            if due and self._has_target(fault):
                self._inject(fault)
                return

    def _processes(self, fault: Fault) -> RoleProcesses:
        return self.roles.policy if target_role(fault) == "policy" else self.roles.engines

    def _has_target(self, fault: Fault) -> bool:
        processes = self._processes(fault)
        return fault.rank < len(processes) and not (fault.phase == "load" and processes.loading)

    def _inject(self, fault: Fault) -> None:
        processes = self._processes(fault)
        self.ledger.record(
            FaultRecord(
                attempt=len(self.ledger.attempts),
                fault_class=fault.fault_class,
                phase=fault.phase,
                step=fault.step,
                rank=fault.rank,
            )
        )
        self.log(f"injected fault: {fault.fault_class} in {fault.phase}, {processes.role} rank {fault.rank}")
        processes.inject(fault.rank, InjectedFault.of(fault, self.roles.settings.policy.device))

    def _times_injected(self, fault: Fault) -> int:
        return sum(
            (record.fault_class, record.phase, record.step, record.rank)
            == (fault.fault_class, fault.phase, fault.step, fault.rank)
            for record in fault_records(self.ledger.records)
        )
