"""Memory in tensors grows with every micro-batch or step.

No message can show this: at the end the card is merely full. It takes samples. Activations come and go within a
micro-batch, the optimizer's state steps up once; only tensors that are kept, on purpose or by mistake, grow steadily
(Fast-LLM 486: 164 MiB a micro-batch; verl 6699: 278 MiB).
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.growth import allocated_growth
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes

_OF_THE_GPU = frozenset(
    {FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL, FailureKind.MATH_LIBRARY, FailureKind.ENGINE_WAKE}
)


def retained_graph(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    if failure.kind not in _OF_THE_GPU | {FailureKind.NO_MESSAGE}:
        return None
    growths = [
        (growth, series) for series in evidence.series if series.is_policy and (growth := allocated_growth(series))
    ]
    if not growths:
        return None
    growth, series = max(growths, key=lambda pair: pair[0].trend.growth_bytes)
    trend = growth.trend
    return Diagnosis(
        FailureClass.RETAINED_GRAPH,
        0.88 if growth.unit == "micro-batch" else 0.75,
        f"Memory in tensors of {series.name} grew from {human_bytes(trend.first_bytes)} to "
        f"{human_bytes(trend.last_bytes)} over {trend.values} samples, "
        f"{human_bytes(trend.mean_growth_bytes)} per {growth.unit}",
        {
            "allocated_first_bytes": trend.first_bytes,
            "allocated_last_bytes": trend.last_bytes,
            "growth_a_sample_bytes": trend.mean_growth_bytes,
            "samples": trend.values,
        },
    )
