"""Recovery within an attempt: after a failure, the plan changes and the failed phase is retried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, PlanChange, Role
from rljob_api.step_report import Evidence, MemoryPressure
from rljob_client.errors import BadInput, RunError
from rljob_memory.recovery import (
    Changed,
    Constraints,
    FailureReport,
    GiveUp,
    GiveUpReason,
    Response,
    Restart,
    messages,
    observed,
    prevent,
    respond,
    role_that_shows,
)
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import HostOutOfMemory, PhaseDeadlineExceeded, SharedMemoryExhausted, WorkerLost
from rljob_trainer.recovery.failure_evidence import gather_evidence, gpu_memory_at_failure, latest_memory
from rljob_trainer.recovery.phase_deadlines import with_stacks
from rljob_trainer.recovery.plan_changes import PlanChanges
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.role_processes import RoleSettings
from rljob_trainer.roles.roles import Roles
from rljob_trainer.run_listener import RunListener
from rljob_trainer.step_report.reporter import role_and_rank


class NewAttempt(Exception):
    """The plan was changed, and the change needs new processes of all roles."""


@dataclass(slots=True)
class Recovery:
    """Recovers from failures of one attempt that need no new attempt."""

    attempt: int
    """Its number, as reported."""
    directory: Path
    changes: PlanChanges
    constraints: Constraints
    roles: Roles
    checkpointing: Checkpointing
    settings_under: Callable[[MemoryPlan], RoleSettings]
    """Returns the settings of the roles for a plan."""
    kills: KernelKills
    display: RunDisplay
    listener: RunListener
    save: Callable[[int], None] = lambda _step: None
    """Writes a checkpoint of the state after the given committed step, and waits for it."""
    renewed: bool = field(default=False, init=False)
    """A role has new processes since a process of it was lost."""
    _renewed_in: int | None = field(default=None, init=False)
    """The last step in which that happened."""
    _retrying: bool = field(default=False, init=False)

    def recover(self, failure: RunError, step: int, phase: Phase | None) -> None:
        """Change the memory plan, record the change and apply it; or end the role of a lost process. The caller then
        retries the phase.

        `phase` None: the roles were starting. Raises `NewAttempt` if the change needs one, and `failure`, possibly with
        an explanation, if the attempt cannot recover from it.
        """
        if isinstance(failure, PhaseDeadlineExceeded):
            raise self._hung(failure, step, phase)
        if isinstance(failure, WorkerLost):
            failure = self.kills.explain(failure)
        evidence = gather_evidence(
            failure, self.directory, attempt=self.attempt, step=step, phase=phase, plan=self.changes.plan
        )
        if evidence is None:
            role, _ = role_and_rank(failure.actor)
            may_renew = self._may_renew(failure, step, phase)
            if not (may_renew and self._count_replacement(failure, role, "the other role continues")):
                raise failure
            self.roles.clock.take()
            self._renew(role)
            self.renewed, self._renewed_in = True, step
            return
        failure.evidence = evidence
        self.listener.failed(evidence)
        cause = evidence.diagnoses[0]
        place = messages.out_of_memory_message(evidence.role, evidence.rank, phase, step, cause)
        self.display.warning(f"OutOfMemory: {place}")
        report = failure_report(failure, self.attempt, evidence.time, dead=dead_roles(self.roles, failure, phase))
        answer = respond(report, self.changes.state, self.constraints)
        if not isinstance(answer, Changed):
            raise _with_explanation(failure, answer)
        self._adopt(answer, evidence)
        if answer.change.level == "RestartInPlace":
            raise NewAttempt
        self._apply(answer, phase)
        self._retrying = True

    def may_replace(self, failure: WorkerLost) -> bool:
        """True if one engine was lost while others work, and a new process may take its place."""
        if self.kills.any_new:
            return False  # the kernel killed it: the memory plan changes
        if failure.place_lost:
            # By the cluster, and not counted: the supervisor creates the pod again, or ends the attempt.
            self.display.warning(f"Continuing without a pod: {failure}; its engine starts again when the pod is back")
            return True
        return self._count_replacement(failure, "rollout", "its prompts move to the other engines")

    def phase_done(self, step: int, phase: Phase | None) -> None:
        """Called after each phase that succeeds. Confirms the change if it is the phase that had failed."""
        record = self.changes.unconfirmed
        if record is None or not (self._retrying or _is_past(record.change, step, phase)):
            return
        self._retrying = False
        change = record.change
        before = gpu_memory_at_failure(record.evidence)
        after = latest_memory(self.directory, role_that_shows(change), change.rank)
        seconds = (datetime.now(UTC) - change.time).total_seconds()
        change = observed(change, before, after).model_copy(update={"seconds_to_recover": round(seconds, 3)})
        self.changes.confirm(change, self.roles.clock.take())
        self.listener.recovered(change)
        self.display.note(f"Recovered: {messages.recovered_message(change)}")

    def prevent(self, pressure: MemoryPressure, step: int) -> frozenset[Role] | None:
        """Change the plan of live processes, or renew those of a role, if that keeps memory from running out.

        Called before `step`, which is the next one. A policy is saved before, so that no step is replayed. Returns the
        renewed roles; None if no change helps.
        """
        now = datetime.now(UTC)
        answer = prevent(pressure, self.changes.state, self.constraints, attempt=self.attempt, step=step, time=now)
        if answer is None:
            return None
        self._adopt(answer, None)
        if "policy" in answer.renew:
            self.save(step - 1)
        for role in answer.renew:
            self.roles.end(role)
        self.roles.change(self.settings_under(answer.plan))
        return answer.renew

    # --- steps of a recovery ---

    def _count_replacement(self, failure: RunError, role: Role, effect: str) -> bool:
        """Count the replacement of a process of `role` in this attempt, and announce it with its `effect`. False if no
        restart is left."""
        now = datetime.now(UTC)
        report = FailureReport(str(failure), self.attempt, now, dead=frozenset({role}), peers_work_on=True)
        answer = respond(report, self.changes.state, self.constraints)
        if not (isinstance(answer, Restart) and answer.of_one_process):
            return False
        self.changes.adopt_replacement(answer)
        self.display.warning(f"Replacing a process: {answer.message}; {effect}")
        return True

    def _may_renew(self, failure: RunError, step: int, phase: Phase | None) -> bool:
        """True if new processes may take the place of those of a role, one of which was lost.

        A second loss in a step ends the attempt. After a loss in a sync, the other role may wait forever. A supervisor
        starts the processes of its pods itself.
        """
        if not isinstance(failure, WorkerLost) or failure.actor is None or self.constraints.is_supervised:
            return False
        return phase not in (None, "sync") and step != self._renewed_in and self.roles.can_start()

    def _renew(self, role: Role) -> None:
        self.roles.end(role)
        if role == "policy":
            self.checkpointing.abandon()

    def _adopt(self, answer: Changed, evidence: Evidence | None) -> None:
        self.changes.adopt(answer, evidence)
        self.listener.plan_changed(answer.change, answer.plan)
        self.display.note(f"PlanChanged: {messages.changed_message(answer.change)}")

    def _hung(self, failure: PhaseDeadlineExceeded, step: int, phase: Phase | None) -> PhaseDeadlineExceeded:
        """The failure with the stacks of the processes, which are then killed: peers wait for the one that hangs."""
        logs = self.roles.settings.output_dir / "logs"
        actors = [*self.roles.policy.handles, *self.roles.engines.handles]
        explained = with_stacks(failure, logs, actors, step, phase)
        self.roles.end("policy")
        self.roles.end("rollout")
        return explained

    def _apply(self, answer: Changed, phase: Phase | None) -> None:
        self.roles.clock.take()
        for role in answer.renew:
            self._renew(role)
        if phase == "checkpoint":
            self.checkpointing.abandon()
        if self.roles.policy.scattered:
            self._rejoin_policy()
        self.roles.change(self.settings_under(answer.plan))

    def _rejoin_policy(self) -> None:
        """Bring the ranks together. If that fails, new processes take their place, and restore the policy."""
        self.checkpointing.keep_if_written()
        try:
            self.roles.rejoin_policy()
        except RunError as failure:
            self.display.warning(f"Replacing the policy's processes: the ranks did not form a new group: {failure}")
            self.roles.end("policy")


def dead_roles(roles: Roles, failure: RunError, phase: Phase | None) -> frozenset[Role]:
    """Roles whose processes are unusable after `failure`.

    - An engine whose core failed is dead, and a failed wake-up maps memory twice if it is retried (vLLM 36651).
    - The kernel or a bus error ends a process that runs out of host or shared memory.
    - A policy that was loading, or whose update was interrupted and cannot be undone, has no usable weights.
    - Ranks that have not left the collective in which one of them failed still wait there (`PolicyProcesses.together`).
    """
    role, _ = role_and_rank(failure.actor)
    dead: set[Role] = set()
    if role != "policy" or isinstance(failure, (HostOutOfMemory, SharedMemoryExhausted)):
        dead.add(role)
    policy_is_whole = roles.policy.loaded and roles.policy_at is not None
    if (role == "policy" or phase == "sync") and not policy_is_whole:
        dead.add("policy")
    return frozenset(dead)


def failure_report(
    failure: RunError, attempt: int, time: datetime, dead: frozenset[Role] = frozenset()
) -> FailureReport:
    """The failure of an attempt, as input of the recovery engine."""
    final = None
    if failure.given_up:
        final = GiveUpReason.NOTHING_LEFT
    elif isinstance(failure, BadInput):
        final = GiveUpReason.BAD_INPUT
    elif failure.evidence is None and not isinstance(failure, WorkerLost):
        # A restart helps after an error in a role process, but not after a full disk or a missing device.
        final = None if failure.actor is not None and type(failure) is RunError else GiveUpReason.TRAINER_ERROR
    return FailureReport(
        str(failure),
        attempt,
        time,
        failure.evidence,
        dead,
        final,
        is_repeatable=not isinstance(failure, WorkerLost),
    )


def _with_explanation(failure: RunError, answer: Response) -> RunError:
    """`failure` with the engine's explanation as its message; `failure` itself if a supervisor handles it."""
    if not isinstance(answer, GiveUp) or answer.reason is GiveUpReason.LEFT_TO_SUPERVISOR:
        return failure
    explained = type(failure)(answer.explanation)
    explained.actor, explained.evidence = failure.actor, failure.evidence
    explained.given_up = True
    return explained


def _is_past(change: PlanChange, step: int, phase: Phase | None) -> bool:
    """True if the phase that `change` answers, of an earlier attempt, has succeeded once `phase` of `step` has."""
    if step != change.step:
        return step > change.step
    return change.phase in (None, phase)


class KernelKills:
    """Kills of one attempt that no failure has been attributed to yet.

    Counting begins before the first process of the attempt starts. A process may be killed at any moment, also while it
    waits, and its loss is noticed only by the next call.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        """`count`: processes that the kernel has OOM-killed, on all machines with roles. It never falls."""
        self._count = count
        self._attributed = count()

    @property
    def any_new(self) -> bool:
        return self._count() > self._attributed

    def explain(self, failure: WorkerLost) -> RunError:
        """The lost process as a failure of host memory, if the kernel has killed one since the last failure."""
        before, self._attributed = self._attributed, self._count()
        if self._attributed <= before:
            return failure
        killed = HostOutOfMemory(
            f"{failure}: the kernel killed it, since the container reached its memory limit (OOMKilled)"
        )
        killed.actor = failure.actor
        return killed
