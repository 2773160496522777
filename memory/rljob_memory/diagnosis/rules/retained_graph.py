"""Memory in tensors rises with every micro-batch or step.

No message can say this: at the end the card is merely full. It takes samples. Activations come and go within a
micro-batch, the optimizer's state steps up once; only what is kept on purpose, or by mistake, rises on and on
(Fast-LLM 486: 164 MiB a micro-batch; verl 6699: 278 MiB).
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.situation import Situation
from rljob_memory.diagnosis.trend import allocated_rise
from rljob_memory.evidence.failure import FailureKind
from rljob_memory.evidence.sizes import human_bytes

_OF_THE_GPU = frozenset(
    {FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL, FailureKind.MATH_LIBRARY, FailureKind.ENGINE_WAKE}
)


def retained_graph(situation: Situation) -> Diagnosis | None:
    if situation.failure.kind not in _OF_THE_GPU | {FailureKind.UNSAID}:
        return None
    rises = [
        (found, series)
        for series in situation.evidence.series
        if series.is_policy and (found := allocated_rise(series))
    ]
    if not rises:
        return None
    found, series = max(rises, key=lambda pair: pair[0].growth_bytes)
    return Diagnosis(
        FailureClass.RETAINED_GRAPH,
        0.88 if found.unit == "micro-batch" else 0.75,
        f"Memory in tensors of {series.name} rose from {human_bytes(found.first_bytes)} to "
        f"{human_bytes(found.last_bytes)} over {found.samples} samples, "
        f"{human_bytes(found.bytes_a_unit)} a {found.unit}",
        {
            "allocated_first_bytes": found.first_bytes,
            "allocated_last_bytes": found.last_bytes,
            "growth_a_sample_bytes": found.bytes_a_unit,
            "samples": found.samples,
        },
    )
