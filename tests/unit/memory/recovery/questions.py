"""Inputs of the recovery engine as hypothesis strategies: plans, constraints, failures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from hypothesis import strategies as st

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.memory_settings import MemorySettings
from rljob_api.plan_change import Phase, Role
from rljob_api.recovery import RecoverySpec
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import Constraints
from rljob_memory.recovery.constraints import LEVELS
from rljob_memory.recovery.growth import PolicyGrowth
from rljob_memory.recovery.pins import pinning_field
from rljob_memory.sizes import MIB
from tests.unit.memory.recovery.failures import diagnosis, failure

_SIZES = st.integers(min_value=1, max_value=4_096).map(lambda number: number * MIB)
_PINNED_VALUES = {
    "empty_cache": "Enabled",
    "expandable_segments": "Disabled",
    "rollout_sleep": "Level1",
    "kv_cache_bytes": "2Gi",
    "micro_batch_tokens": 4_096,
    "logprob_chunk_tokens": 512,
    "activation_checkpointing": "Disabled",
    "optimizer_offload": "Disabled",
    "sync_bucket_bytes": "256Mi",
    "detach_metrics": "Disabled",
    "weight_export": "SwitchSegments",
}
PINNABLE = frozenset(_PINNED_VALUES)
"""Settings of the plan that a manifest can pin."""


def settings_that_pin(pinned: Iterable[str]) -> MemorySettings:
    """`spec.memory` with these settings of the plan pinned to any value."""
    return MemorySettings.model_validate({pinning_field(name): _PINNED_VALUES[name] for name in pinned})


plans = st.fixed_dictionaries(
    {
        "generation": st.integers(min_value=1, max_value=9),
        "empty_cache": st.booleans(),
        "expandable_segments": st.booleans(),
        "rollout_sleep": st.sampled_from(("Disabled", "Level1", "Level2")),
        "kv_cache_bytes": _SIZES,
        "micro_batch_tokens": st.integers(min_value=1, max_value=16_384),
        "logprob_chunk_tokens": st.integers(min_value=1, max_value=8_192),
        "activation_checkpointing": st.booleans(),
        "optimizer_offload": st.booleans(),
        "sync_bucket_bytes": _SIZES,
        "detach_metrics": st.booleans(),
        "weight_export": st.sampled_from(("ReservedBuffer", "SwitchSegments")),
        "host_memory_bytes": st.none() | _SIZES,
        "shared_memory_bytes": st.none() | _SIZES,
        "excluded_nodes": st.sampled_from(([], ["gpu-7"])),
    }
).map(MemoryPlan.model_validate)

profiles = st.fixed_dictionaries(
    {
        "policy_ranks": st.integers(min_value=1, max_value=4),
        "colocated": st.booleans(),
        "longest_sequence_tokens": st.integers(min_value=1, max_value=2_048),
        "smallest_kv_cache_bytes": _SIZES,
        "largest_parameter_bytes": _SIZES,
        "weight_bytes": _SIZES,
        "optimizer_bytes": _SIZES,
        "activation_bytes_per_token": st.integers(min_value=0, max_value=MIB),
        "checkpointed_activation_bytes_per_token": st.integers(min_value=0, max_value=MIB),
        "logits_bytes_per_token": st.integers(min_value=0, max_value=MIB),
        "device_total_bytes": st.just(0) | _SIZES,
        "host_memory_bytes": _SIZES,
        "shared_memory_bytes": _SIZES,
    }
).map(MemoryProfile.model_validate)

every_constraints = st.builds(
    Constraints,
    settings=st.sets(st.sampled_from(sorted(PINNABLE))).map(settings_that_pin),
    recovery=st.fixed_dictionaries(
        {
            "max_adjustments": st.just(100),
            "max_host_memory": st.none() | _SIZES,
            "max_shared_memory": st.none() | _SIZES,
        }
    ).map(RecoverySpec.model_validate),
    profile=st.none() | profiles,
    levels=st.frozensets(st.sampled_from(LEVELS), min_size=1),
    supported_settings=st.none()
    | st.frozensets(st.sampled_from(["expandableSegments", "microBatchTokens", "kvCache"])),
    host_memory_limit_bytes=st.none() | _SIZES,
    predicted_host_memory_limit_bytes=st.none() | _SIZES,
    shared_memory_bytes=st.none() | _SIZES,
    node=st.sampled_from([None, "gpu-1", "gpu-7"]),
    growth=st.none()
    | st.builds(
        PolicyGrowth,
        ranks=st.just(1),
        larger=st.sampled_from([(), (2,), (2, 4)]),
        most=st.just(4),
        level=st.sampled_from(["RestartInPlace", "ReplacePods"]),
        room=st.sampled_from([None, 1, 2]),
    ),
)

_diagnoses = st.builds(
    lambda cause, numbers: diagnosis(cause, 0.5, **numbers),
    st.sampled_from([str(cause) for cause in FailureClass]),
    st.dictionaries(
        st.sampled_from(["requested_bytes", "free_bytes", "needed_bytes", "wanted_bytes", "policy_cache_bytes"]), _SIZES
    ),
)
evidences = st.builds(
    lambda found, role, phase: failure(*found, role=role, phase=phase),
    st.lists(_diagnoses, min_size=1, max_size=3),
    st.sampled_from(get_args(Role)),
    st.sampled_from([None, *get_args(Phase)]),
)
