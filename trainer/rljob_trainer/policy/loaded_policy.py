"""The parts of a policy that a rank has loaded."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_trainer.policy.memory_mitigations.policy_offload import PolicyOffload
from rljob_trainer.policy.model import PolicyModel
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.policy.state_snapshot import StateSnapshot
from rljob_trainer.policy.update import PolicyUpdate


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """All parts exist at all times, but the weights may be in host memory. `with_weights` returns the parts with their
    weights on the device. Use the other members for settings, process groups, and code that can also read weights in
    host memory (`MasterAdamW.weights_of`).
    """

    model: PolicyModel

    reference: PolicyModel | None
    """With adapters, `model` itself."""

    optimizer: MasterAdamW

    snapshot: StateSnapshot | None

    update: PolicyUpdate

    offload: PolicyOffload

    def with_weights(self) -> LoadedPolicy:
        """The parts, with weights on the device. If it lacks the memory, its error is raised, and nothing changes."""
        self.offload.bring_back()
        return self

    def models(self) -> list[PolicyModel]:
        return distinct_models(self.model, self.reference)


def distinct_models(model: PolicyModel, reference: PolicyModel | None) -> list[PolicyModel]:
    return [model] if reference is None or reference is model else [model, reference]
