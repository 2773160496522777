"""The causes of out-of-memory failures: a table of classes, each with the condition that shows it.

Observed memory less expected memory is an excess, and the largest excess names the class (`balance`). The last request
counts with its own size, and the stack or a marker shows the work that it was for. Chance decides which request finds a
GPU full: after a growth, or next to something large that nobody expects there, the last request is not the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rljob_memory.diagnosis.balance import Balance, is_context
from rljob_memory.diagnosis.causes.engine import FREED_NOTHING_BYTES, engine_not_asleep, kv_cache_oversized
from rljob_memory.diagnosis.causes.finding import Finding, Weight
from rljob_memory.diagnosis.causes.host import host_memory, shared_memory
from rljob_memory.diagnosis.causes.last_request import (
    activation_spike,
    is_after_the_first_step,
    model_weights,
    optimizer_state,
    weight_sync_spike,
)
from rljob_memory.diagnosis.causes.other_processes import (
    contexts_on,
    controller_context,
    foreign_process,
    gpu_memory_limit,
)
from rljob_memory.diagnosis.causes.torch_memory import allocator_cache, fragmentation, growth_alone, retained_graph
from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.growth import cache_growth
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.sizes import GIB, human_bytes

Cause = Callable[[Balance], Finding | None]


CAUSES: Mapping[FailureClass, Cause] = {
    FailureClass.FRAGMENTATION: fragmentation,
    FailureClass.ALLOCATOR_CACHE: allocator_cache,
    FailureClass.RETAINED_GRAPH: retained_graph,
    FailureClass.ACTIVATION_SPIKE: activation_spike,
    FailureClass.KV_CACHE_OVERSIZED: kv_cache_oversized,
    FailureClass.WEIGHT_SYNC_SPIKE: weight_sync_spike,
    FailureClass.MODEL_WEIGHTS: model_weights,
    FailureClass.OPTIMIZER_STATE: optimizer_state,
    FailureClass.ENGINE_NOT_ASLEEP: engine_not_asleep,
    FailureClass.FOREIGN_PROCESS: foreign_process,
    FailureClass.CONTROLLER_CONTEXT: controller_context,
    FailureClass.GPU_MEMORY_LIMIT: gpu_memory_limit,
    FailureClass.HOST_MEMORY: host_memory,
    FailureClass.SHARED_MEMORY: shared_memory,
}
"""All are asked; their order decides between causes of the same weight and size."""


def found_causes(balance: Balance) -> list[tuple[FailureClass, Finding]]:
    """The causes that fit, the largest excess first."""
    found = [(name, finding) for name, cause in CAUSES.items() if (finding := cause(balance)) is not None]
    most = _most_of_the_last_request(balance)
    bounds = dict.fromkeys(_LAST_REQUESTS, most)
    if is_after_the_first_step(balance) or balance.is_full_of_state:
        # The same pass fit before, or there is no room for any.
        bounds[FailureClass.ACTIVATION_SPIKE] = min(most, Weight.POSSIBLE)
    weighed = [
        (name, replace(finding, weight=min(finding.weight, bounds.get(name, finding.weight))))
        for name, finding in found
    ]
    return sorted(weighed, key=lambda pair: (-pair[1].weight, -pair[1].excess_bytes))


_LAST_REQUESTS = frozenset(
    {
        FailureClass.ACTIVATION_SPIKE,
        FailureClass.WEIGHT_SYNC_SPIKE,
        FailureClass.MODEL_WEIGHTS,
        FailureClass.OPTIMIZER_STATE,
    }
)


def _most_of_the_last_request(balance: Balance) -> Weight:
    """Most weight of the last request next to everything else that takes the GPU."""
    most = Weight.CERTAIN
    if balance.growths or cache_growth(balance.evidence.series):
        most = Weight.POSSIBLE
    device = balance.device
    if device is None or not device.total_bytes:
        return most
    if balance.has_an_unexpected_holder:
        most = min(most, Weight.POSSIBLE)
    if balance.foreign_bytes() > (device.allocated_bytes or device.process_bytes or 0):
        most = min(most, Weight.FAINT)
    return most


_WEIGHTS_BYTES = 4 * GIB
"""More than what a sleeping engine keeps in addition to its weights."""
_MANY_CONTEXTS = 3
_EQUAL = 1.02


def found_without_failure(evidence: CollectedEvidence) -> tuple[FailureClass, Finding] | None:
    """A log without a failure: memory in tensors that has grown a lot, contexts of processes that do not work on their
    GPU, or weights that an engine's sleep of level 1 left there, since they are not in the engine's own pool."""
    if grown := growth_alone(evidence):
        return FailureClass.RETAINED_GRAPH, grown
    for gpu, processes in evidence.gpu_processes.items():
        contexts = [process for process in processes if is_context(process)]
        sizes = [process.used_bytes for process in contexts]
        largest = max((process.used_bytes for process in processes), default=0)
        if len(sizes) >= _MANY_CONTEXTS and max(sizes) <= _EQUAL * min(sizes) and largest > max(sizes):
            found = contexts_on(Weight.POSSIBLE, gpu, contexts)
            message = f"The log shows no failure, but {found.message[0].lower()}{found.message[1:]}."
            return FailureClass.CONTROLLER_CONTEXT, replace(found, message=message)
    engine = evidence.engine
    backed_up, left = engine.backed_up_bytes, engine.still_in_use_bytes
    if engine.sleep_level != 1 or backed_up is None or left is None:
        return None
    if backed_up >= FREED_NOTHING_BYTES or left < _WEIGHTS_BYTES:
        return None
    message = (
        f"The log shows no failure, but the engine's sleep of level 1 copied {human_bytes(backed_up)} of weights to "
        f"the host, and {human_bytes(left)} stayed in use on the GPU."
    )
    return FailureClass.ENGINE_NOT_ASLEEP, Finding(Weight.POSSIBLE, message, left, {"still_in_use_bytes": left})
