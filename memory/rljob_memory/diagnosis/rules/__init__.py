"""One rule per class, each in its own module with its reasons and thresholds."""

from collections.abc import Callable

from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.diagnosis.rules.activation_spike import activation_spike
from rljob_memory.diagnosis.rules.allocator_cache import allocator_cache
from rljob_memory.diagnosis.rules.controller_context import controller_context
from rljob_memory.diagnosis.rules.engine_not_asleep import engine_not_asleep
from rljob_memory.diagnosis.rules.foreign_process import foreign_process
from rljob_memory.diagnosis.rules.fragmentation import fragmentation
from rljob_memory.diagnosis.rules.gpu_memory_limit import gpu_memory_limit
from rljob_memory.diagnosis.rules.host_memory import host_memory
from rljob_memory.diagnosis.rules.kv_cache_oversized import kv_cache_oversized
from rljob_memory.diagnosis.rules.model_weights import model_weights
from rljob_memory.diagnosis.rules.optimizer_state import optimizer_state
from rljob_memory.diagnosis.rules.retained_graph import retained_graph
from rljob_memory.diagnosis.rules.shared_memory import shared_memory
from rljob_memory.diagnosis.rules.weight_sync_spike import weight_sync_spike
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure

RULES: tuple[Callable[[Failure, CollectedEvidence, Ledger], Diagnosis | None], ...] = (
    fragmentation,
    allocator_cache,
    retained_graph,
    activation_spike,
    kv_cache_oversized,
    weight_sync_spike,
    model_weights,
    optimizer_state,
    engine_not_asleep,
    foreign_process,
    controller_context,
    gpu_memory_limit,
    host_memory,
    shared_memory,
)
"""All are asked; their order only decides between diagnoses of the same confidence."""
