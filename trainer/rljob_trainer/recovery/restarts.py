"""New attempts under the same plan, where nobody but this command is there to begin them."""

from __future__ import annotations

from rljob_trainer.errors import TrainerError, WorkerLost

STEPS_THAT_FORGIVE_A_RESTART = 10
"""An attempt that commits so many steps gives one restart back."""


class Restarts:
    """How often the job may be started again after failures that have nothing to do with memory."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._used = 0
        self._last_in_vain = ""

    def grant(self, failure: TrainerError, committed: int) -> bool:
        """Whether another attempt follows one that ended by `failure` after it had `committed` so many steps.

        A process that died is worth it. One that failed in words is, unless it says the same again without a step.
        """
        if not isinstance(failure, WorkerLost) and (failure.actor is None or type(failure) is not TrainerError):
            return False
        if committed >= STEPS_THAT_FORGIVE_A_RESTART:
            self._used = max(0, self._used - 1)
        said = "" if isinstance(failure, WorkerLost) or committed else str(failure)
        if self._used >= self._allowed or (said and said == self._last_in_vain):
            return False
        self._used += 1
        self._last_in_vain = said
        return True

    @property
    def count(self) -> str:
        """`restart 1 of 3`."""
        return f"restart {self._used} of {self._allowed}"
