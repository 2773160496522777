"""The table of remedies: every change that can follow a failure, in the order of their price.

An entry has the causes that it acts on, and a function for the next value. The memory that it frees is no part of it:
that is the difference of two budgets (`effects.expected_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.plan_change import RemedyLevel, Role
from rljob_memory.budget import Phase
from rljob_memory.diagnosis import FailureClass as Class
from rljob_memory.plan_settings import is_pinned, name_of, text_of
from rljob_memory.recovery import next_values as values
from rljob_memory.recovery import pod_limits
from rljob_memory.recovery.constraints import LEVELS
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.state import ENGINE_PROCESSES, NOT_OF_THE_PLAN, POLICY_PROCESSES, PROCESSES


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of one setting."""

    setting: str
    """Field of the plan, or one of `NOT_OF_THE_PLAN`."""
    causes: tuple[Class, ...]
    """Classes whose cause it can remove or lessen; none for the last resort."""
    next_value: Callable[[Case], object]
    """The next value for a failure; None, or the present value, if it can do nothing about it, or nothing more."""
    level: RemedyLevel = "RespawnRole"
    """Level that it needs if no process is dead."""
    owner: Role | None = "policy"
    """Role whose processes have the setting; None: the pods have it."""
    phase: Phase = "update"
    """Phase whose budget shows its effect."""
    excess: Callable[[Case], int | None] | None = None
    """Memory beyond the budget that it removes, by the diagnosis. None: it changes the budget."""
    present: Callable[[Case], object] | None = None
    """The value in force where the plan leaves it open."""
    bound: Callable[[Case], str | None] = lambda _: None
    """Value to write in the manifest, as a line, if only a bound there prevents the change."""
    brings: Mapping[str, object] = field(default_factory=dict)
    """Settings of the plan that change with it, unless they are pinned."""

    @property
    def name(self) -> str:
        """The setting as spelled in the manifest and in the status."""
        return name_of(self.setting) if self.of_the_plan else self.setting

    @property
    def of_the_plan(self) -> bool:
        """True if it changes the plan, as new processes do not."""
        return self.setting not in NOT_OF_THE_PLAN

    def fields_changed(self, case: Case, value: object) -> dict[str, object]:
        """New values of fields of the plan. Another trainer, which has no setup, gets that of `setting` alone."""
        changed = {self.setting: value} if self.of_the_plan else {}
        brought = {} if case.setup is None else self.brings
        pins = case.constraints.settings
        return changed | {name: brought[name] for name in brought if not is_pinned(pins, name)}

    def value_before(self, case: Case) -> object:
        """The value in force."""
        if self.present is not None:
            return self.present(case)
        return getattr(case.plan, self.setting) if self.of_the_plan else "kept"

    def text_of(self, value: object) -> str:
        """`value` as the manifest writes it."""
        return text_of(self.setting, value)


def remedies_for(failure_class: Class) -> list[Remedy]:
    """The remedies that act on a class: the cheapest level first, and within a level in the order of their price."""
    acting = [remedy for remedy in REMEDIES if failure_class in remedy.causes]
    return sorted(acting, key=lambda remedy: LEVELS.index(remedy.level))


_OF_TOKENS = (Class.ACTIVATION_SPIKE, Class.FRAGMENTATION, Class.UNKNOWN)
"""Peaks that are linear in them, and the largest allocation."""
_OUTSIDE_A_STEP = (Class.ACTIVATION_SPIKE, Class.KV_CACHE_OVERSIZED, Class.WEIGHT_SYNC_SPIKE, Class.UNKNOWN)
"""Failures next to an optimizer's state, or a KV cache, that waits."""
_BESIDE_A_KV_CACHE = (*_OUTSIDE_A_STEP, Class.ALLOCATOR_CACHE, Class.ENGINE_NOT_ASLEEP)
_HELD_BY_OTHERS = (Class.FOREIGN_PROCESS, Class.CONTROLLER_CONTEXT)
_LEAKS = (Class.RETAINED_GRAPH, Class.HOST_MEMORY)
_OF_THE_HOST = (Class.HOST_MEMORY, Class.SHARED_MEMORY)

POLICY_GPUS = Remedy(
    "policy_gpus",
    (),
    values.larger_policy,
    "ReplacePods",
    phase="optimizer",
    present=values.ranks,
    bound=values.bound_of_growth,
    brings={"policy_copies": 1},  # the GPUs are to hold less, and may not be a multiple of the copies
)
"""The last resort: it costs the cluster resources, and acts on no cause in particular. Weights, gradients and optimizer
state are divided among the ranks, and so are the sequences of a step."""

REMEDIES: Sequence[Remedy] = (
    # Free. The only remedy for its cause: smaller micro-batches delay the failure (Fast-LLM 486, verl 6699).
    Remedy("detach_metrics", (Class.RETAINED_GRAPH,), values.detached, "Live", excess=values.growth),
    # About 80 ms a step.
    Remedy(
        "empty_cache",
        (Class.ALLOCATOR_CACHE, Class.UNKNOWN, Class.KV_CACHE_OVERSIZED, Class.WEIGHT_SYNC_SPIKE),
        values.to(True, values.cache_is_in_the_way),
        "Live",
        excess=values.number("policy_cache_bytes"),
    ),
    # No measurable cost.
    Remedy(
        "expandable_segments",
        (Class.ALLOCATOR_CACHE, Class.UNKNOWN, Class.FRAGMENTATION),
        values.to(True, values.segments_help),
        "Live",
        excess=values.unused_by_the_policy,
    ),
    # Next to nothing, unlike smaller micro-batches.
    Remedy("logprob_chunk_tokens", _OF_TOKENS, values.smaller_chunk, "Live"),
    # A round trip for each bucket.
    Remedy(
        "sync_bucket_bytes",
        (Class.WEIGHT_SYNC_SPIKE, Class.SHARED_MEMORY, Class.UNKNOWN),
        values.smaller_bucket,
        "Live",
        phase="sync",
    ),
    Remedy("micro_batch_tokens", _OF_TOKENS, values.fewer_tokens, "Live"),
    # The wake-up, well under a second. Levels 1 and 2 free the same GPU memory; level 2 keeps no weights on the host.
    Remedy(
        "rollout_sleep",
        (Class.ENGINE_NOT_ASLEEP, Class.ACTIVATION_SPIKE, Class.OPTIMIZER_STATE, Class.UNKNOWN),
        values.to("Level2", lambda case: case.of_a_shared_policy and not case.plan.rollout_sleep_level),
        owner="rollout",
        brings={"empty_cache": True},  # an engine that sleeps needs the policy's cache to wake up
    ),
    Remedy(
        "rollout_sleep",
        (Class.HOST_MEMORY,),
        values.to("Level2", lambda case: case.shares_gpu and case.plan.rollout_sleep_level == 1),
        owner="rollout",
        brings={"empty_cache": True},
    ),
    # A buffer that exists only during a sync leaves room to the update; one that is kept has its block in the sync.
    Remedy(
        "weight_export",
        (Class.ACTIVATION_SPIKE, Class.OPTIMIZER_STATE),
        values.to("SwitchSegments", lambda case: case.of_a_shared_policy and case.phase == "update"),
    ),
    Remedy(
        "weight_export",
        (Class.FRAGMENTATION,),
        values.to("ReservedBuffer", lambda case: case.of_a_shared_policy and case.phase == "sync"),
        excess=values.number("requested_bytes"),
    ),
    # Throughput of the rollout phase, once the cache holds fewer sequences than the step has.
    Remedy("kv_cache_bytes", _BESIDE_A_KV_CACHE, values.kv_cache, owner="rollout", phase="rollout"),
    # About a third more time of an update (Chen et al. 2016, one forward pass more).
    Remedy(
        "activation_checkpointing",
        (Class.ACTIVATION_SPIKE, Class.UNKNOWN),
        values.to(True, lambda case: case.in_update),
    ),
    # Weights and gradients pass the network in each micro-batch, instead of gradients once in an update.
    Remedy(
        "policy_copies",
        (Class.OPTIMIZER_STATE, Class.FRAGMENTATION, *_BESIDE_A_KV_CACHE),
        values.to(1, lambda case: case.plan.policy_copies > 1),
    ),
    # A copy each way per step.
    Remedy(
        "policy_offload",
        (Class.KV_CACHE_OVERSIZED, Class.ACTIVATION_SPIKE, Class.UNKNOWN),
        values.to(True, values.weights_can_wait),
        "Live",
        phase="rollout",
    ),
    # A copy each way per update. The buckets that are on the GPU during an optimizer step count only where it failed.
    Remedy("optimizer_offload", (Class.OPTIMIZER_STATE,), values.state_to_host, phase="optimizer"),
    Remedy(
        "optimizer_offload",
        _OUTSIDE_A_STEP,
        lambda case: None if case.in_optimizer_step else values.state_to_host(case),
    ),
    Remedy("optimizer_offload", (Class.HOST_MEMORY,), values.state_to_gpu),
    # The start of an engine, and no step: its weights come with the next sync. A leak ends with its process; engines
    # have been seen to keep more GPU memory after each sleep (NVIDIA-NeMo/RL 2619, vllm-project/vllm 36651).
    Remedy(
        ENGINE_PROCESSES,
        (Class.ENGINE_NOT_ASLEEP, *_LEAKS),
        values.to("fresh", values.will_grow_in("rollout")),
        owner="rollout",
        excess=values.number("own_growth_bytes"),
    ),
    # The start of the policy, and a checkpoint. After a failure, it starts anew whenever its processes are unusable.
    Remedy(
        POLICY_PROCESSES,
        _LEAKS,
        values.to("fresh", values.will_grow_in("policy")),
        excess=values.number("own_growth_bytes"),
    ),
    Remedy(
        ENGINE_PROCESSES,
        (Class.ENGINE_NOT_ASLEEP,),
        values.to("fresh", values.engine_kept_memory),
        owner="rollout",
        excess=values.number("other_processes_bytes"),
    ),
    # New containers end a process that an earlier process of the same pod left on the GPU, so they are tried once.
    # A process of another user stays on its node, which the job then leaves.
    Remedy(PROCESSES, _HELD_BY_OTHERS, values.fresh_once, "RestartInPlace", None, excess=values.held_by_others),
    Remedy(
        "host_memory_bytes",
        _OF_THE_HOST,
        pod_limits.of_a_worker(pod_limits.larger_limit),
        "ReplacePods",
        None,
        present=pod_limits.limit_bytes,
        bound=pod_limits.of_a_worker(pod_limits.bound_of_limit),
    ),
    Remedy(
        "controller_host_memory_bytes",
        _OF_THE_HOST,
        pod_limits.of_the_controller(pod_limits.larger_limit),
        "ReplacePods",
        None,
        present=pod_limits.limit_bytes,
        bound=pod_limits.of_the_controller(pod_limits.bound_of_limit),
    ),
    Remedy(
        "shared_memory_bytes",
        (Class.SHARED_MEMORY,),
        pod_limits.larger_shared_memory,
        "ReplacePods",
        None,
        present=pod_limits.shared_memory_bytes,
        bound=pod_limits.bound_of_shared_memory,
    ),
    Remedy(
        "excluded_nodes",
        _HELD_BY_OTHERS,
        values.without_this_node,
        "ReplacePods",
        None,
        excess=values.held_by_others,
        bound=values.only_node,
    ),
    POLICY_GPUS,
)

CHANGEABLE_SETTINGS = frozenset(remedy.name for remedy in REMEDIES)
"""Names of the settings in all changes that can be made."""
