"""Watches a job's memory from step to step, and reports that it will run out before it does."""

from __future__ import annotations

from rljob_api.plan_change import DiagnosisStatus
from rljob_api.step_report import MemoryPressure
from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.forecast.growth_signals import GrowthSignal, growth_signals
from rljob_memory.forecast.phase_series import StepHistory, StepSamples

_FARTHEST = 10
"""No further ahead than ten times the observed steps: a line through 12 steps does not predict the 2,000th."""
_SOON_STEPS = 20
_SURE = 0.7
_FIRM_BONUS = 0.05
_LONG_BONUS = 0.05
_LONG_STEPS = 16
_RETRIES_BONUS = 0.1

_PREVENTABLE = frozenset({FailureClass.RETAINED_GRAPH, FailureClass.ALLOCATOR_CACHE, FailureClass.FRAGMENTATION})
"""A live change acts on these. New engines act on memory that an engine itself keeps. The others take new pods, which
only a failure justifies."""


class Forecast:
    """Give it each committed step, then ask for the pressure. That costs next to nothing while no memory grows."""

    def __init__(self, steps: int | None = None) -> None:
        """`steps`: of the whole job. Memory that would run out only after the last step is not reported."""
        self._steps = steps
        self._step, self._engines_sleep = 0, False
        self._history = StepHistory()

    def observe(self, step: int, samples: StepSamples, *, engines_sleep: bool = False) -> None:
        """`samples`: at the end of each phase of `step`, by actor (`policy-0`) and phase. `engines_sleep`: beside the
        policy, during its update."""
        self._step, self._engines_sleep = step, engines_sleep
        self._history.add(samples)

    def forget(self) -> None:
        """Drop the history: the processes are new, or work under another plan."""
        self._history.clear()

    def pressure(self) -> MemoryPressure | None:
        """The memory that is projected to run out first; None if none will before the job is done."""
        series = list(self._history.series())
        signals = growth_signals(series, engines_sleep=self._engines_sleep)
        seen = [signal for signal in signals if signal.steps_left <= self._horizon(signal)]
        if not seen:
            return None
        first = min(seen, key=lambda signal: (signal.steps_left, -signal.confidence))
        return MemoryPressure(
            diagnosis=DiagnosisStatus(
                class_name=str(first.failure_class),
                confidence=_confidence(first),
                message=f"{first.message}, enough for {_steps(first.steps_left)}.",
                numbers=first.numbers(),
            ),
            role=first.role,
            rank=first.series.rank,
            steps_left=first.steps_left,
        )

    def _horizon(self, signal: GrowthSignal) -> int:
        farthest = _FARTHEST * signal.trend.values
        return farthest if self._steps is None else min(farthest, self._steps - self._step)


def worth_preventing(pressure: MemoryPressure) -> bool:
    """True if something should be changed now: the failure is near and sure enough, and a cheap change acts on it."""
    diagnosis = pressure.diagnosis
    engine_keeps_it = pressure.role == "rollout" and "own_growth_bytes" in diagnosis.numbers
    can_help = diagnosis.class_name in _PREVENTABLE or engine_keeps_it
    return can_help and diagnosis.confidence >= _SURE and pressure.steps_left <= _SOON_STEPS


def _confidence(signal: GrowthSignal) -> float:
    """Higher if the trend is firm and long, and if the allocator already had to give its cache back."""
    trend, series = signal.trend, signal.series
    has_retried = series.last.alloc_retries > series.samples[0].alloc_retries
    bonus = _FIRM_BONUS * trend.is_firm + _LONG_BONUS * (trend.values >= _LONG_STEPS) + _RETRIES_BONUS * has_retried
    return round(min(signal.confidence + bonus, 0.95), 2)


def _steps(count: int) -> str:
    return "1 more step" if count == 1 else f"{count} more steps"
