"""One rule per class of cause, grouped by the memory that they explain."""

from collections.abc import Callable

from rljob_memory.diagnosis.classes import Diagnosis
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.diagnosis.rules.engine_memory import engine_not_asleep, kv_cache_oversized, weight_sync_spike
from rljob_memory.diagnosis.rules.host_memory import host_memory, shared_memory
from rljob_memory.diagnosis.rules.other_processes import controller_context, foreign_process, gpu_memory_limit
from rljob_memory.diagnosis.rules.policy_memory import activation_spike, model_weights, optimizer_state
from rljob_memory.diagnosis.rules.torch_cache import allocator_cache, fragmentation, retained_graph
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
