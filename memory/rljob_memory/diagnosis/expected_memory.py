"""Memory that a model should take: weights, gradients, Adam's state, logits; by its number of parameters."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_memory.evidence.model_facts import ModelFacts

_ADAM_BYTES = 8
"""Two moments in float32 for each parameter."""
_LOGIT_BYTES = 4
"""float32."""
_MOST_OF_THEM = 0.5
_DEFAULT_BYTES = 2
"""bfloat16, which nearly all trainers load models in."""


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """Memory of one unsharded copy of a model in training, in bytes."""

    parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    is_guess: bool
    """The number of parameters is that of the model's name."""

    @property
    def training_bytes(self) -> int:
        """Weights, gradients and optimizer's state together."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def logits_bytes(tokens: int, vocabulary: int) -> int:
    """Of one pass, in float32."""
    return tokens * vocabulary * _LOGIT_BYTES


def expected_memory(model: ModelFacts) -> ExpectedMemory | None:
    """None if the log shows no number of parameters."""
    by_name, trained = model.parameters_of_name, model.trained_parameters
    # Trained parameters are all, unless they are few beside those of the name: then they are adapters.
    parameters = model.parameters or (trained if trained and trained >= _MOST_OF_THEM * (by_name or 0) else by_name)
    if not parameters:
        return None
    each = model.parameter_bytes or _DEFAULT_BYTES
    trained = trained or parameters
    return ExpectedMemory(
        parameters=parameters,
        weights_bytes=parameters * each,
        gradients_bytes=trained * each,
        optimizer_bytes=trained * _ADAM_BYTES,
        is_guess=not model.parameters and parameters == by_name,
    )
