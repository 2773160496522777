"""One failure under one plan, as a remedy looks at it."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_api.plan_change import DiagnosisStatus, Phase, Role
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.history import History
from rljob_memory.recovery.latitude import Latitude

_PAIRS_OF_WANTED_AND_LEFT = (
    ("requested_bytes", "free_bytes"),
    ("wanted_bytes", "free_bytes"),
    ("needed_bytes", "available_bytes"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """`failure_class`: the class to act on. `diagnosis`: the cause that is answered, of that class unless none of its
    own remedies is left. `causes`: the classes of all diagnoses. `role`, `phase`: of the process that failed; phase
    None: it was starting. `message`: the error as it saw it. `device_free_bytes`: free on its GPU at that moment.
    `process_lives`: nothing has failed yet, memory is only running out.
    """

    failure_class: FailureClass
    diagnosis: DiagnosisStatus
    causes: frozenset[FailureClass]
    role: Role
    phase: Phase | None
    plan: MemoryPlan
    history: History
    latitude: Latitude
    message: str = ""
    device_free_bytes: int | None = None
    process_lives: bool = False

    @property
    def facts(self) -> MemoryProfile | None:
        return self.latitude.facts

    def number(self, *names: str) -> int | None:
        """The first of `names` that the diagnosis has a number for; bytes or a count, as the name says."""
        return next((found for name in names if (found := self.diagnosis.numbers.get(name)) is not None), None)

    @property
    def need_bytes(self) -> int | None:
        """What was missing: what was asked for less what was left. None where the failure gave no numbers."""
        for wanted_name, left_name in _PAIRS_OF_WANTED_AND_LEFT:
            if wanted := self.number(wanted_name):
                missing = wanted - (self.number(left_name) or 0)
                return missing if missing > 0 else wanted
        return None

    @property
    def on_gpu(self) -> bool:
        """Whether the job uses GPUs. Without facts that is assumed."""
        return self.facts is None or self.facts.device_total_bytes > 0

    @property
    def shares_gpu(self) -> bool:
        """Whether what the policy holds is in the engine's way, and the other way round."""
        return self.on_gpu and (self.facts is None or self.facts.colocated)

    @property
    def in_update(self) -> bool:
        """Whether a policy's pass through the model was going on, or may have been: another trainer does not say."""
        unsaid = self.phase is None and (self.facts is None or self.process_lives)
        return self.role == "policy" and (self.phase == "update" or unsaid)

    @property
    def engine_is_awake(self) -> bool:
        """Whether an engine had its memory when this failed, so that a smaller engine would have left more."""
        return self.role == "rollout" or self.phase != "update" or self.plan.rollout_sleep_level == 0
