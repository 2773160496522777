"""Memory in tensors grows with every micro-batch or step.

No message can show this: at the end the card is merely full. It takes samples. Activations come and go within a
micro-batch, the optimizer's state steps up once; only tensors that are kept, on purpose or by mistake, grow steadily
(Fast-LLM 486: 164 MiB a micro-batch; verl 6699: 278 MiB).
"""

from __future__ import annotations

import re

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.growth import PastGrowth, large_growth
from rljob_memory.diagnosis.ledger import Ledger
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.named_figures import Measure
from rljob_memory.sizes import human_bytes
from rljob_memory.trend import Trend

_OF_THE_GPU = frozenset(
    {FailureKind.ALLOCATOR, FailureKind.DRIVER, FailureKind.NCCL, FailureKind.MATH_LIBRARY, FailureKind.ENGINE_WAKE}
)

_LARGE_SHARE = 0.3
_CONFIDENCES = {Measure.TENSORS: (0.88, 0.75), Measure.GPU: (0.78, 0.65), Measure.RESERVED: (0.55, 0.45)}
"""Of a growth without a pause that is a large part of what was held, and of another one."""
_FEW_VALUES, _OF_FEW_VALUES = 8, 0.6
_TITLES = {
    Measure.TENSORS: "Memory in tensors",
    Measure.GPU: "GPU memory",
    Measure.RESERVED: "Memory reserved by torch",
}
_GROWS_IN_HEALTH = re.compile(r"load|init|creat|build|shard|layer|warm|max|peak", re.IGNORECASE)
"""In the words before a figure: memory that grows while a model is made, or a peak, which never falls."""


def retained_graph(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if failure.kind not in _OF_THE_GPU | {FailureKind.NO_MESSAGE} and not failure.is_of_the_gpu:
        return None
    if not ledger.growths:
        return _collected(failure) or _reported(evidence)
    growth, series = max(
        ledger.growths, key=lambda pair: (pair[1].measure is Measure.TENSORS, pair[0].trend.growth_bytes)
    )
    trend = growth.trend
    return Diagnosis(
        FailureClass.RETAINED_GRAPH,
        _confidence(growth, series.measure),
        f"{_TITLES[series.measure]} of {series.name} grew from {human_bytes(trend.first_bytes)} to "
        f"{human_bytes(trend.last_bytes)} over {trend.values} samples, "
        f"{human_bytes(trend.mean_growth_bytes)} per {growth.unit}",
        {
            "allocated_first_bytes": trend.first_bytes,
            "allocated_last_bytes": trend.last_bytes,
            "growth_a_sample_bytes": trend.mean_growth_bytes,
            "samples": trend.values,
        },
    )


def _confidence(growth: PastGrowth, measure: Measure) -> float:
    if growth.unit == "micro-batch":
        return 0.88
    firm, ordinary = _CONFIDENCES[measure]
    if growth.trend.values < _FEW_VALUES:
        return min(ordinary, _OF_FEW_VALUES)
    return firm if _fills_the_gpu(growth.trend) else ordinary


def growth_alone(evidence: CollectedEvidence) -> Diagnosis | None:
    """Memory in tensors that has grown a lot, in a log without a failure: people post it before or instead of one."""
    policies = [series for series in evidence.series if series.is_policy and not _GROWS_IN_HEALTH.search(series.name)]
    growths = [(growth, series) for series in policies if (growth := large_growth(series))]
    if not growths:
        return None
    (first, last), series = max(growths, key=lambda pair: pair[0][1] - pair[0][0])
    return Diagnosis(
        FailureClass.RETAINED_GRAPH,
        0.5,
        f"The log shows no failure, but {_lower(_TITLES[series.measure])} of {series.name} grew from "
        f"{human_bytes(first)} to {human_bytes(last)} over {len(series.samples)} samples.",
        {"allocated_first_bytes": first, "allocated_last_bytes": last, "samples": len(series.samples), "failures": 0},
    )


def _lower(title: str) -> str:
    return title if title.startswith("GPU") else f"{title[0].lower()}{title[1:]}"


def _collected(failure: Failure) -> Diagnosis | None:
    """Results of an evaluation that are kept on the GPU until its end: the stack shows it, in one step."""
    if failure.activity is not Activity.COLLECTING:
        return None
    more = f"; {human_bytes(failure.requested_bytes)} more did not fit" if failure.requested_bytes else ""
    return Diagnosis(FailureClass.RETAINED_GRAPH, 0.55, f"Results of all batches are collected on the GPU{more}")


def _reported(evidence: CollectedEvidence) -> Diagnosis | None:
    """A person saw the growth, and wrote so beside the log. That outranks the place where the last request failed."""
    if not evidence.reported_growth:
        return None
    return Diagnosis(
        FailureClass.RETAINED_GRAPH, 0.65, f"The text reports that GPU memory grows: “{evidence.reported_growth[:160]}”"
    )


def _fills_the_gpu(trend: Trend) -> bool:
    """True if the memory grew without a pause, and its growth is a large part of what was held at the end."""
    return trend.is_firm and trend.growth_bytes >= _LARGE_SHARE * trend.last_bytes
