"""The memory plan with which an attempt begins, from the hardware or from the process that starts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import StartingProfile
from rljob_api.plan_change import PlanChange, RemedyLevel
from rljob_api.status import Role
from rljob_client.errors import OutputUnavailable
from rljob_client.plan_command import faster_engines, seconds_line
from rljob_client.run_directory.durable_files import free_bytes
from rljob_client.run_directory.ledger import Ledger
from rljob_memory.budget import Budget, Setup, budget, facts_of, host
from rljob_memory.fit import fit
from rljob_memory.hardware import Hardware
from rljob_memory.model_shape import compute_bytes
from rljob_memory.plan import first_plan
from rljob_memory.plan_settings import texts_of, with_pins
from rljob_memory.pod_memory import summary
from rljob_memory.profile import plan_on_machine
from rljob_memory.recovery import Constraints, RecoveryState
from rljob_memory.recovery.constraints import policy_growth
from rljob_memory.recovery.other_machine import PlanFacts, differing_facts, plan_facts, rederived
from rljob_memory.sizes import human_bytes
from rljob_memory.workload import workload_of
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.hardware import Machine
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.recovery.plan_changes import PlanChanges, facts_of_plan
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.run_inputs import ModelInput

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Supervision:
    """State and abilities of the process that starts the attempt."""

    attempt: int | None = None
    """Its number for the attempt; None: the ledger's."""

    plan: MemoryPlan | None = None
    """The plan from earlier attempts; None: there is none."""

    profile: StartingProfile | None = None
    """Profile of earlier jobs that `plan` comes from, if its generation is 1."""

    changes: Sequence[PlanChange] = ()
    """Plan changes from earlier attempts, oldest first."""

    levels: frozenset[RemedyLevel] = frozenset({"Live", "RespawnRole", "RestartInPlace"})
    """Levels of plan changes that can be applied without outside help."""

    allocator_environments: Mapping[Role, Mapping[str, str]] = field(default_factory=dict)
    """Environment variables of the CUDA allocator, for roles whose defaults are overridden."""

    @property
    def by_operator(self) -> bool:
        """An operator makes the changes that need new containers; otherwise this process does, on one machine."""
        return "RestartInPlace" not in self.levels


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """The memory plan with which an attempt begins."""

    changes: PlanChanges
    """The plan, and its changes from now on."""

    constraints: Constraints
    """Constraints on changes of the plan."""

    facts: PlanFacts
    """The facts that the plan is computed for."""

    setup: Setup
    """The job's work, model and machine."""


def plan_attempt(
    spec: RLJobSpec,
    model: ModelInput,
    hosts: RoleHosts,
    *,
    state: RecoveryState,
    ledger: Ledger,
    directory: OutputDirectory,
    supervision: Supervision,
    display: RunDisplay,
    listener: RunListener,
) -> AttemptPlan:
    """Compute the plan, or take that of earlier attempts, which is computed again on other hardware.

    `state`: at the start of the attempt. Warns if the host's memory or disk may not suffice. Raises `OutputUnavailable`
    if the disk cannot hold a checkpoint and the model.
    """
    shape = model.dimensions.shape(compute_bytes(spec, hosts.device), model.adapter_parameters)
    setup = Setup(workload_of(spec), shape, hardware_of(hosts))
    plan = fresh = first_plan(spec.memory, setup)
    facts = plan_facts(setup)
    if state.plan is not None:
        plan = state.plan
        if supervision.profile is not None and plan.generation == 1:
            plan, differences = plan_on_machine(plan, supervision.profile, fresh, facts_of(setup))
            _announce_profile(supervision.profile, plan, differences, display)
        elif differences := differing_facts(facts_of_plan(ledger, plan), facts):
            log.info("computing the memory plan again", differences=differences)
            display.note(f"Computing the memory plan again: {', '.join(differences)}")
            plan = rederived(plan, state.changes, fresh)
        shares_gpu = hosts.device == "cuda" and setup.work.is_colocated
        plan = with_pins(plan, spec, shares_gpu=shares_gpu)
    predicted, available = budget(setup, plan), setup.hardware.host_memory_bytes
    if hosts.device == "cuda":
        _announce(spec, setup, predicted, display)
    needed = setup.work.policy_pods * predicted.peak("host")
    if needed > available:
        display.warning(
            f"The job is predicted to need {human_bytes(needed)} of host memory, and has {human_bytes(available)}; "
            f"predicted: {summary(predicted, spec, shape)}"
        )
    missing = max(setup.work.kept_models - directory.exported_models(), 1)
    model_bytes = missing * predicted.bytes_of("trained model", "disk") // setup.work.kept_models
    checkpoint_bytes = host.checkpoint_bytes(setup.work, shape)
    require_free_disk(spec, checkpoint_bytes, model_bytes, directory, ledger.last_step, display.warning)
    changes = PlanChanges(ledger, replace(state, plan=plan))
    listener.memory_facts_found(facts_of(setup), changes.own)
    listener.attempt_began(plan, ledger.steps, display.warning)
    growth = None if supervision.by_operator else policy_growth(spec, "RestartInPlace", room=_room(spec, hosts))
    constraints = Constraints(spec.memory, spec.recovery, setup, supervision.levels, growth=growth)
    return AttemptPlan(changes, constraints, facts, setup)


def _announce_profile(profile: StartingProfile, plan: MemoryPlan, differences: list[str], display: RunDisplay) -> None:
    """Print the settings that come from earlier jobs, or the reason for which they are ignored."""
    if differences:
        display.note(f"Ignoring memory profile {profile.name}: {', '.join(differences)}")
    else:
        texts = texts_of(plan)
        settings = [f"{each.remedy.setting} {texts.get(each.remedy.setting, '')}" for each in profile.changes]
        display.note(f"Settings of memory profile {profile.name}: {', '.join(settings)}")


def _announce(spec: RLJobSpec, setup: Setup, predicted: Budget, display: RunDisplay) -> None:
    """Print what the budget predicts, and faster engines. Warn if the job does not fit."""
    peaks = ", ".join(f"{phase} {human_bytes(predicted.peak('gpu', phase))}" for phase in predicted.seconds_by_phase)
    display.note(f"predicted for a GPU of {human_bytes(setup.hardware.device_memory_bytes)}: {peaks}")
    for line in (seconds_line(predicted), *faster_engines(fit(spec.memory, setup))):
        display.note(line)
    if (missing := setup.missing_bytes(predicted)) > 0:
        display.warning(
            f"The job is predicted to need {human_bytes(missing)} more GPU memory than is planned with; "
            "`rljob plan` lists what would fit"
        )


def hardware_of(hosts: RoleHosts) -> Hardware:
    return Hardware(
        device=hosts.device,
        device_memory_bytes=min(hosts.machine.gpu_memory_bytes) if hosts.device == "cuda" else 0,
        engine_device_memory_bytes=0 if hosts.engine_machine == hosts.machine else _gpu_bytes(hosts.engine_machine),
        host_memory_bytes=hosts.machine.host_memory_bytes,
        gpu=hosts.machine.gpu_name[:64],
        shared_memory_bytes=hosts.shared_memory_bytes,
        layers_compiled=hosts.layers_compiled,
    )


def _gpu_bytes(machine: Machine) -> int:
    return min(machine.gpu_memory_bytes, default=0)


def require_free_disk(
    spec: RLJobSpec,
    checkpoint_bytes: int,
    model_bytes: int,
    directory: OutputDirectory,
    last_step: int,
    warn: Callable[[str], None],
) -> None:
    """Raise `OutputUnavailable` if a checkpoint and the model cannot fit; warn if those that are kept may not.

    `checkpoint_bytes`, `model_bytes`: sizes of one checkpoint, and of the exported models that are missing.
    `last_step`: the last committed one. Checkpoints that exist count as written.
    """
    due = -(-max(spec.algorithm.steps - last_step, 0) // spec.checkpoint.every_steps)
    kept = CheckpointStore(directory.checkpoints, spec.checkpoint.keep).count()
    missing, free = max(0, min(due, spec.checkpoint.keep + 1 - kept)), free_bytes(directory.path)
    if free >= model_bytes + missing * checkpoint_bytes:
        return
    message = (
        f"{directory.path} has {human_bytes(free)} of free disk; the model is predicted to need "
        f"{human_bytes(model_bytes)}, and {missing} more checkpoints {human_bytes(checkpoint_bytes)} each"
    )
    if free < model_bytes + min(missing, 1) * checkpoint_bytes:
        raise OutputUnavailable(f"the disk is full: {message}. Free some space, or give another --output.")
    warn(f"{message}. Free some space, or lower checkpoint.keep ({spec.checkpoint.keep})")


def _room(spec: RLJobSpec, hosts: RoleHosts) -> int | None:
    """GPUs of this machine that the policy can have; None on a CPU."""
    if hosts.device == "cpu":
        return None
    of_engines = 0 if spec.topology == "Colocated" else hosts.engine_processes
    return len(hosts.machine.gpu_memory_bytes) - of_engines
