"""All families of remedies, by the resource that they free."""

from rljob_memory.recovery.families.engine_gpu_memory import KV_CACHE, ROLLOUT_SLEEP, SYNC_BUCKET, WEIGHT_EXPORT
from rljob_memory.recovery.families.host_memory import CONTROLLER_HOST_MEMORY, HOST_MEMORY, SHARED_MEMORY
from rljob_memory.recovery.families.policy_gpu_memory import (
    ACTIVATION_CHECKPOINTING,
    DETACH_METRICS,
    EMPTY_CACHE,
    EXPANDABLE_SEGMENTS,
    LOGPROB_CHUNK,
    MICRO_BATCH,
    OPTIMIZER_OFFLOAD,
    POLICY_OFFLOAD,
)
from rljob_memory.recovery.families.processes_and_gpus import (
    EXCLUDED_NODES,
    FRESH_ENGINES,
    FRESH_PROCESSES,
    POLICY_GPUS,
)
from rljob_memory.recovery.family import Family

FAMILIES: tuple[Family, ...] = (
    DETACH_METRICS,
    EMPTY_CACHE,
    EXPANDABLE_SEGMENTS,
    LOGPROB_CHUNK,
    SYNC_BUCKET,
    MICRO_BATCH,
    ROLLOUT_SLEEP,
    WEIGHT_EXPORT,
    KV_CACHE,
    ACTIVATION_CHECKPOINTING,
    POLICY_OFFLOAD,
    OPTIMIZER_OFFLOAD,
    FRESH_ENGINES,
    FRESH_PROCESSES,
    HOST_MEMORY,
    CONTROLLER_HOST_MEMORY,
    SHARED_MEMORY,
    EXCLUDED_NODES,
    POLICY_GPUS,
)
"""In the order of their price: free changes, those that cost a little time per step, those that cost much, and those
that cost the cluster resources. Within the trainer the order follows docs/mitigations.md."""

CHANGEABLE_SETTINGS = frozenset(family.name for family in FAMILIES)
"""Names of the settings in all changes that can be made."""
