"""Expected memory of a failing process: by the budget of its job, else by the size of the model in a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.memory_failure import Activity
from rljob_memory.budget import Budget, Line, Phase, Pod, budget, others
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure
from rljob_memory.evidence.model_facts import ModelFacts


def budget_of(failure: Failure, evidence: CollectedEvidence) -> Budget | None:
    """The budget of the failing process's GPU; None without GPUs, or if the job's setup or its plan is unknown."""
    setup = evidence.setup
    if setup is None or evidence.plan is None or failure.role not in ("policy", "rollout"):
        return None
    if setup.hardware.device == "cpu":
        return None
    pod: Pod = "rollout" if failure.role == "rollout" and evidence.engines_apart else "policy"
    return budget(setup, evidence.plan).of("gpu", pod=pod)


def lines_at(failure: Failure, of_its_gpu: Budget, *, of_others: bool) -> list[Line]:
    """Lines in the phase of the failure, the largest first: of the failing process, or of others on its GPU."""
    phase: Phase = "rollout" if failure.phase == "reward" else failure.phase or "start"
    if phase == "update" and failure.activity is Activity.OPTIMIZER:
        phase = "optimizer"
    owner = "engine" if failure.role == "rollout" else "policy"
    lines = (line for line in of_its_gpu.lines if phase in line.phases and (line.owner != owner) == of_others)
    return sorted(lines, key=lambda line: -line.bytes)


_WEIGHTS, _GRADIENTS = ("weights", "frozen weights", "engine's weights"), ("gradients",)
_OPTIMIZER = ("masters", "moments", "Adam's state")
_MOST_OF_THEM = 0.5


@dataclass(frozen=True, slots=True)
class Expected:
    """Tensors that a process should have."""

    lines: tuple[Line, ...]
    """Lines of the job's budget, or those of one unsharded copy of the model if only a log shows it."""
    parameters: int
    is_guess: bool
    """The number of parameters is that of the model's name."""

    @property
    def weights_bytes(self) -> int:
        return self._bytes_of(_WEIGHTS)

    @property
    def gradients_bytes(self) -> int:
        return self._bytes_of(_GRADIENTS)

    @property
    def optimizer_bytes(self) -> int:
        return self._bytes_of(_OPTIMIZER)

    @property
    def training_bytes(self) -> int:
        """Weights, gradients and optimizer's state together."""
        return self._bytes_of((*_WEIGHTS, *_GRADIENTS, *_OPTIMIZER))

    def _bytes_of(self, uses: Sequence[str]) -> int:
        return sum(line.bytes for line in self.lines if line.use in uses)


def expected_of(model: ModelFacts) -> Expected | None:
    """One copy of the model in a log; None if it shows no number of parameters."""
    by_name, trained = model.parameters_of_name, model.trained_parameters
    # Trained parameters are all, unless they are few beside those of the name: then they are adapters.
    parameters = model.parameters or (trained if trained and trained >= _MOST_OF_THEM * (by_name or 0) else by_name)
    if not parameters:
        return None
    is_guess, by_its_name = not model.parameters and parameters == by_name, " by the model's name"
    reason = f"{parameters / 1e9:.2f} billion parameters{by_its_name if is_guess else ''}"
    lines = others.copy_lines(parameters, trained or parameters, model.parameter_bytes, reason)
    return Expected(tuple(lines), parameters, is_guess)
