"""One attempt of a job: the input of all builders of objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_api.job import RLJob, RLJobSpec, grown_spec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_operator.objects.pod_layout import PodLayout
from rljob_operator.settings import OperatorSettings

ControllerPlacement = Literal["GpuFreeNodes", "UntaintedNodes", "AnyNode"]
Gang = Literal["Native", "Kueue", "Volcano"]


@dataclass(frozen=True, slots=True)
class JobAttempt:
    """A job, the number of the attempt, and everything else that its objects depend on."""

    job: RLJob

    settings: OperatorSettings

    namespace: str

    uid: str

    number: int
    """Number of the attempt, from 1."""

    plan: MemoryPlan | None
    """None until the trainer has reported its first plan."""

    controller_placement: ControllerPlacement

    gang: Gang

    plan_changes: tuple[PlanChange, ...] = ()
    """The latest changes of the plan, oldest first."""

    restarts_in_place: bool = False
    """The nodes can restart all containers of a pod by a restart rule."""

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def spec(self) -> RLJobSpec:
        """The job's, with the policy's size in the plan. The pods get the manifest of `job`."""
        return grown_spec(self.job.spec, self.plan)

    @property
    def own_trainer(self) -> bool:
        """RLJob's own trainer runs, with a controller pod; otherwise the image of `spec.trainer` runs alone."""
        return self.spec.trainer is None

    @property
    def torch_version(self) -> str | None:
        """torch in the worker pods; None if unknown."""
        return self.settings.trainer_torch_version if self.spec.trainer is None else self.spec.trainer.torch_version

    @property
    def gpu_resource(self) -> str:
        return self.settings.gpu_resources[0]

    @property
    def layout(self) -> PodLayout:
        return PodLayout.of(self.spec)
