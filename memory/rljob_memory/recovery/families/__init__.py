"""All families of remedies."""

from rljob_memory.recovery.families.activation_checkpointing import ACTIVATION_CHECKPOINTING
from rljob_memory.recovery.families.allocator import EMPTY_CACHE, EXPANDABLE_SEGMENTS
from rljob_memory.recovery.families.detached_metrics import DETACH_METRICS
from rljob_memory.recovery.families.engine_processes import FRESH_ENGINES
from rljob_memory.recovery.families.foreign_processes import EXCLUDED_NODES, FRESH_PROCESSES
from rljob_memory.recovery.families.host_memory import CONTROLLER_HOST_MEMORY, HOST_MEMORY
from rljob_memory.recovery.families.kv_cache import KV_CACHE
from rljob_memory.recovery.families.micro_batch import LOGPROB_CHUNK, MICRO_BATCH
from rljob_memory.recovery.families.optimizer_offload import OPTIMIZER_OFFLOAD
from rljob_memory.recovery.families.policy_gpus import POLICY_GPUS
from rljob_memory.recovery.families.policy_offload import POLICY_OFFLOAD
from rljob_memory.recovery.families.rollout_sleep import ROLLOUT_SLEEP
from rljob_memory.recovery.families.shared_memory import SHARED_MEMORY
from rljob_memory.recovery.families.weight_sync import SYNC_BUCKET, WEIGHT_EXPORT
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
