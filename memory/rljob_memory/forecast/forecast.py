"""Watches a job's memory from step to step, and says before it happens that memory will run out."""

from __future__ import annotations

from rljob_api.plan_change import DiagnosisStatus
from rljob_api.step_report import MemoryPressure
from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.forecast.samples import History, StepSamples
from rljob_memory.forecast.signs import Sign, signs

_FARTHEST = 10
"""No further ahead than ten times what was seen: a line through 12 steps says nothing of the 2,000th."""
_SOON_STEPS = 20
_SURE = 0.7
_FIRM_BONUS = 0.05
_LONG_BONUS = 0.05
_LONG_STEPS = 16
_RETRIES_BONUS = 0.1

_PREVENTABLE = frozenset({FailureClass.RETAINED_GRAPH, FailureClass.ALLOCATOR_CACHE, FailureClass.FRAGMENTATION})
"""Something live acts on these; the others take new pods, which only a failure is worth."""


class Forecast:
    """Feed it each committed step; then ask. Asking costs next to nothing while nothing rises."""

    def __init__(self, steps: int | None = None) -> None:
        """`steps`: of the whole job. What would run out only after the last is no news."""
        self._steps = steps
        self._step = 0
        self._history = History()

    def observe(self, step: int, samples: StepSamples) -> None:
        """`samples`: at the end of each phase of `step`, by actor (`policy-0`) and phase."""
        self._step = step
        self._history.add(samples)

    def forget(self) -> None:
        """The processes are new, or work under another plan: what was seen before says nothing of what comes."""
        self._history.clear()

    def pressure(self) -> MemoryPressure | None:
        """What runs out first, if it goes on like this; None where nothing will before the job is done."""
        series = list(self._history.series())
        seen = [sign for sign in signs(series) if sign.steps_left <= self._horizon(sign)]
        if not seen:
            return None
        first = min(seen, key=lambda sign: (sign.steps_left, -sign.confidence))
        return MemoryPressure(
            diagnosis=DiagnosisStatus(
                class_name=str(first.failure_class),
                confidence=_confidence(first),
                message=f"{first.sentence}: enough for {_steps(first.steps_left)}.",
                numbers=first.numbers(),
            ),
            role=first.series.role,
            rank=first.series.rank,
            steps_left=first.steps_left,
        )

    def _horizon(self, sign: Sign) -> int:
        farthest = _FARTHEST * sign.rise.values
        return farthest if self._steps is None else min(farthest, self._steps - self._step)


def worth_preventing(pressure: MemoryPressure) -> bool:
    """Whether to change the plan now: it is near, it is sure enough, and a live change can act on it."""
    diagnosis = pressure.diagnosis
    return diagnosis.class_name in _PREVENTABLE and diagnosis.confidence >= _SURE and pressure.steps_left <= _SOON_STEPS


def _confidence(sign: Sign) -> float:
    """More where the rise is firm and long, and where the allocator has already had to give its cache back to go on."""
    retried = sign.series.last.alloc_retries > sign.series.samples[0].alloc_retries
    bonus = _FIRM_BONUS * sign.rise.firm + _LONG_BONUS * (sign.rise.values >= _LONG_STEPS) + _RETRIES_BONUS * retried
    return round(min(sign.confidence + bonus, 0.95), 2)


def _steps(count: int) -> str:
    return "1 step more" if count == 1 else f"{count} steps more"
