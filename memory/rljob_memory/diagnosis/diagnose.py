"""`diagnose(evidence)`: every rule is asked; what fits is said, the likeliest first."""

from __future__ import annotations

from dataclasses import replace

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.rules import RULES
from rljob_memory.diagnosis.situation import Situation, place_of
from rljob_memory.evidence.evidence import Evidence
from rljob_memory.evidence.sizes import human_bytes

_LEAST_CONFIDENCE = 0.3
_UNKNOWN_CONFIDENCE = 0.5
_UNKNOWN_BESIDE = 0.5
"""Where the likeliest cause is less sure than this, that it is none of them is said too."""


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    """The causes that fit the first failure, best first; `Unknown` where none does; empty where nothing failed."""
    if evidence.failure is None:
        return []
    situation = Situation(evidence, evidence.failure)
    found = [diagnosis for rule in RULES if (diagnosis := rule(situation)) is not None]
    fitting = sorted(
        (diagnosis for diagnosis in found if diagnosis.confidence >= _LEAST_CONFIDENCE),
        key=lambda diagnosis: -diagnosis.confidence,
    )
    best = fitting[0].confidence if fitting else 0.0
    if best < _UNKNOWN_BESIDE:
        fitting.append(_unknown(situation, _UNKNOWN_CONFIDENCE if not fitting else round(best / 2, 2)))
    return [_completed(diagnosis, situation) for diagnosis in fitting]


def _unknown(situation: Situation, confidence: float) -> Diagnosis:
    text = situation.failure.text
    said = f": “{text[:160]}”" if text else ""
    device = situation.device
    if device and device.free_bytes is not None and device.free_bytes > device.requested_bytes:
        said = f", though {human_bytes(device.free_bytes)} were free for {human_bytes(device.requested_bytes)}{said}"
    sentence = f"Memory ran out ({situation.failure.kind}), and nothing that was seen says why{said}"
    return Diagnosis(FailureClass.UNKNOWN, confidence, sentence)


def _completed(diagnosis: Diagnosis, situation: Situation) -> Diagnosis:
    """With where it happened, and all numbers that the message had."""
    numbers = {**situation.numbers(), **diagnosis.numbers}
    return replace(diagnosis, message=f"{diagnosis.message}{place_of(situation.failure)}.", numbers=numbers)
