"""What is done about a failure so that the phase it was in can be done again: one story, from failure to recovery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, PlanChange, RemedyLevel, Role
from rljob_api.step_report import Evidence, MemoryPressure, RankMemory
from rljob_memory.recovery import GiveUp, Latitude, Remedy, decide, observed, prevent, role_that_shows
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import HostOutOfMemory, TrainerError, WorkerLost
from rljob_trainer.recovery.failure_evidence import gather_evidence, latest_memory
from rljob_trainer.recovery.plan_changes import PlanChanges
from rljob_trainer.recovery.sentences import out_of_memory_line, plan_changed_line, recovered_line
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.colocated import ColocatedRoles, RoleSettings
from rljob_trainer.run_listener import RunListener
from rljob_trainer.step_report.content import role_and_rank


class NewAttempt(Exception):
    """The plan was changed, and it takes new processes of everything to bring the change into force."""


@dataclass(slots=True)
class Recovery:
    """Answers the failures of one attempt, as far as that can be done within it.

    `attempt`: its number, as reported. `latitude`: what may be changed, and at which levels. `settings_under`: the
    roles' settings under a plan. `kills_by_the_kernel`: how many processes the kernel has killed for their memory,
    wherever roles run.
    """

    attempt: int
    directory: Path
    changes: PlanChanges
    latitude: Latitude
    roles: ColocatedRoles
    checkpointing: Checkpointing
    settings_under: Callable[[MemoryPlan], RoleSettings]
    kills_by_the_kernel: Callable[[], int]
    display: RunDisplay
    listener: RunListener
    _kills: int = field(init=False)
    _trying_again: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._kills = self.kills_by_the_kernel()

    def recover(self, failure: TrainerError, step: int, phase: Phase | None) -> None:
        """Change the memory plan, write the change down, and bring it into force; the caller then tries again.

        `phase` None: the roles were starting. Raises `failure`, or the same with the account of what was tried, where
        nothing can be done here; `NewAttempt` where it takes one.
        """
        failure = self._explained(failure)
        evidence = gather_evidence(
            failure, self.directory, attempt=self.attempt, step=step, phase=phase, plan=self.changes.plan
        )
        if evidence is None:
            raise failure
        failure.evidence = evidence
        self.listener.failed(evidence)
        self.display.warning(out_of_memory_line(evidence))
        if self.latitude.settings.mode == "Disabled":
            raise failure
        decision = decide(evidence, self.changes.plan, self.changes.standing, self.latitude)
        if isinstance(decision, GiveUp):
            raise failure if self.latitude.supervised else _with_account(failure, decision)
        lost = self._lost_roles(failure, phase)
        change = _plan_change(evidence, decision, _level(decision, lost))
        self._adopt(change, decision, evidence)
        if change.level == "RestartInPlace":
            raise NewAttempt
        self._bring_into_force(decision, lost, phase)
        self._trying_again = True

    def phase_done(self, step: int, phase: Phase | None) -> None:
        """Told after each phase that is done: where it is the one that had failed, the change has proved itself."""
        record = self.changes.unproven
        if record is None or not (self._trying_again or _is_past(record.change, step, phase)):
            return
        self._trying_again = False
        change = record.change
        before = _memory_of_a_gpu(record.evidence)
        after = latest_memory(self.directory, role_that_shows(change), change.rank)
        seconds = (datetime.now(UTC) - change.time).total_seconds()
        change = observed(change, before, after).model_copy(update={"seconds_to_recover": round(seconds, 3)})
        self.changes.prove(change, self.roles.clock.take())
        self.listener.recovered(change)
        self.display.note(recovered_line(change))

    def prevent(self, pressure: MemoryPressure, step: int) -> bool:
        """Change the plan of live processes before `step`, where that keeps memory from running out."""
        remedy = prevent(pressure, self.changes.plan, self.changes.history, self.latitude)
        if remedy is None:
            return False
        change = PlanChange(
            generation=remedy.plan.generation,
            time=datetime.now(UTC),
            attempt=self.attempt,
            step=step,
            role=pressure.role,
            rank=pressure.rank,
            diagnosis=remedy.diagnosis,
            remedy=remedy.status,
            level=remedy.level,
            preventive=True,
        )
        self._adopt(change, remedy, None)
        self.roles.change(self.settings_under(remedy.plan))
        return True

    # --- how ---

    def _adopt(self, change: PlanChange, remedy: Remedy, evidence: Evidence | None) -> None:
        self.changes.adopt(change, remedy.plan, evidence)
        self.listener.plan_changed(change, remedy.plan)
        self.display.note(plan_changed_line(remedy))

    def _explained(self, failure: TrainerError) -> TrainerError:
        """A lost process as a failure of host memory, where the kernel has killed one since the attempt began."""
        if not isinstance(failure, WorkerLost):
            return failure
        kills = self.kills_by_the_kernel()
        if kills <= self._kills:
            return failure
        self._kills = kills
        killed = HostOutOfMemory(
            f"{failure}: the kernel killed it, since the container reached its memory limit (OOMKilled)"
        )
        killed.actor = failure.actor
        return killed

    def _lost_roles(self, failure: TrainerError, phase: Phase | None) -> frozenset[Role]:
        """Roles whose processes cannot be used any more.

        An engine that ran out of memory is undefined. So is a policy that was loading, that was left halfway through an
        update, or one of several ranks: the others may sit in a collective that nobody will end.
        """
        role, _ = role_and_rank(failure.actor)
        policy_is_whole = self.roles.policy.loaded and self.roles.policy_at is not None
        alone = len(self.roles.policy) == 1
        lost: set[Role] = set()
        if role == "rollout" or isinstance(failure, HostOutOfMemory):
            lost.add(role)
        if (role == "policy" or phase == "sync") and not (policy_is_whole and alone):
            lost.add("policy")
        return frozenset(lost)

    def _bring_into_force(self, remedy: Remedy, lost: frozenset[Role], phase: Phase | None) -> None:
        self.roles.clock.take()
        ended = lost | remedy.respawn
        for role in ended:
            self.roles.end(role)
        if "policy" in ended or phase == "checkpoint":
            self.checkpointing.abandon()
        self.roles.change(self.settings_under(remedy.plan))


def _level(remedy: Remedy, lost: frozenset[Role]) -> RemedyLevel:
    return "RespawnRole" if remedy.level == "Live" and lost else remedy.level


def _plan_change(evidence: Evidence, remedy: Remedy, level: RemedyLevel) -> PlanChange:
    return PlanChange(
        generation=remedy.plan.generation,
        time=evidence.time,
        attempt=evidence.attempt,
        step=evidence.step,
        phase=evidence.phase,
        role=evidence.role,
        rank=evidence.rank,
        diagnosis=remedy.diagnosis,
        remedy=remedy.status,
        level=level,
    )


def _with_account(failure: TrainerError, decision: GiveUp) -> TrainerError:
    """`failure` with the full account in its words."""
    told = type(failure)(decision.sentence)
    told.actor, told.trace, told.evidence = failure.actor, failure.trace, failure.evidence
    told.given_up = True
    return told


def _memory_of_a_gpu(evidence: Evidence | None) -> RankMemory | None:
    """Memory at the failure. On the CPU no failure says how much it asked for, so nothing is observed there."""
    memory = evidence.memory if evidence else None
    return memory if memory and memory.device_total_bytes else None


def _is_past(change: PlanChange, step: int, phase: Phase | None) -> bool:
    """Whether what failed in an earlier attempt, before `change`, is done, once `phase` of `step` is."""
    if step != change.step:
        return step > change.step
    return change.phase in (None, phase)
