"""All families of remedies, in the order of their price."""

from rljob_memory.recovery.families.activation_checkpointing import ACTIVATION_CHECKPOINTING
from rljob_memory.recovery.families.allocator import EMPTY_CACHE, EXPANDABLE_SEGMENTS
from rljob_memory.recovery.families.detached_metrics import DETACH_METRICS
from rljob_memory.recovery.families.host_memory import CONTROLLER_HOST_MEMORY, HOST_MEMORY
from rljob_memory.recovery.families.kv_cache import KV_CACHE
from rljob_memory.recovery.families.micro_batch import LOGPROB_CHUNK, MICRO_BATCH
from rljob_memory.recovery.families.neighbours import EXCLUDED_NODES, FRESH_PROCESSES
from rljob_memory.recovery.families.optimizer_offload import OPTIMIZER_OFFLOAD
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
    OPTIMIZER_OFFLOAD,
    FRESH_PROCESSES,
    HOST_MEMORY,
    CONTROLLER_HOST_MEMORY,
    SHARED_MEMORY,
    EXCLUDED_NODES,
)
"""What costs nothing first, then what costs a little time in each step, then what costs much, then what costs the
cluster something. Order of the settings within the trainer: mitigations by effect and price, PyTorch's
CUDACachingAllocator and vLLM's sleep mode as their sources have them."""
