"""Settings of the role processes: their number, place, and what they are given when they start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rljob_api.topology import Topology
from rljob_trainer.hardware import Bundle
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.rollout.config import RolloutConfig


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Settings of the role processes."""

    topology: Topology

    ranks: int
    """Policy ranks."""

    engine_processes: int
    """Processes of all rollout engines. Colocated: as many as ranks, one on each GPU."""

    policy: PolicyConfig

    rollout: RolloutConfig

    policy_environment: dict[str, str]
    """Environment variables of the policy processes."""

    rollout_environment: dict[str, str]
    """Environment variables of the engine processes."""

    output_dir: Path

    bundles: tuple[Bundle, ...] | None
    """The Ray resources of each GPU and of the processes on it: those of the ranks, then those of engines with GPUs of
    their own. None: the processes may run anywhere."""

    @property
    def processes_of_an_engine(self) -> int:
        return self.rollout.tensor_parallel_size

    @property
    def first_engine_bundle(self) -> int:
        """Index of the bundle of engine 0. Colocated engines are in the bundles of the ranks."""
        return 0 if self.topology == "Colocated" else self.ranks

    @property
    def gpus_per_process(self) -> float:
        """GPUs that each process requests of Ray: half a one if a policy rank and an engine share it."""
        if self.policy.device == "cpu":
            return 0.0
        return 0.5 if self.topology == "Colocated" else 1.0
