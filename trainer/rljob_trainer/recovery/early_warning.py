"""Warnings that memory will run out, and the change of the live plan that prevents it, if there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rljob_api.plan_change import Phase, Role
from rljob_api.step_report import MemoryPressure
from rljob_memory.forecast import Forecast, worth_preventing
from rljob_memory.recovery import messages
from rljob_memory.sample import MemorySample
from rljob_trainer.run_listener import RunListener


class EarlyWarning:
    """Watches the memory of each committed step."""

    def __init__(
        self,
        steps: int,
        prevent: Callable[[MemoryPressure, int], frozenset[Role] | None],
        listener: RunListener,
        warn: Callable[[str], None],
    ) -> None:
        """`steps`: number in the job. `prevent`: acts before a step. Returns the roles with new processes, none if it
        has changed the plan of all that run; None if nothing helps."""
        self._forecast = Forecast(steps)
        self._prevent = prevent
        self._listener = listener
        self._warn = warn
        self._warned_about: tuple[str, str, int] | None = None

    def look(
        self, step: int, memory: Mapping[str, Mapping[Phase, MemorySample]], *, engines_sleep: bool = False
    ) -> None:
        """`memory`: samples of the committed `step`, by actor name and phase. `engines_sleep`: next to the policy,
        during its update."""
        samples = {actor: {str(phase): sample for phase, sample in of.items()} for actor, of in memory.items()}
        self._forecast.observe(step, samples, engines_sleep=engines_sleep)
        pressure = self._forecast.pressure()
        self._listener.pressure(pressure)
        self._warn_once(pressure)
        if pressure is not None and worth_preventing(pressure):
            renewed = self._prevent(pressure, step + 1)
            if renewed is not None:
                self._forecast.forget(renewed)

    def forget(self) -> None:
        """Discard all samples, after a change of the plan or a restart of processes."""
        self._forecast.forget()

    def _warn_once(self, pressure: MemoryPressure | None) -> None:
        """Warn when process or cause differ from those of the previous step."""
        about = None if pressure is None else (pressure.diagnosis.class_name, pressure.role, pressure.rank)
        if pressure is not None and about != self._warned_about:
            self._warn(f"MemoryPressure: {messages.pressure_message(pressure)}")
        self._warned_about = about
