"""Engine and policy must compute the same probabilities: checked once, in the first step of a run."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_trainer.errors import BadInput
from rljob_trainer.policy.result import UpdateResult

_LARGEST_MEAN_NATS = 1.0
"""bfloat16 gives 0.01 to 0.05 nats, an engine in 8 bits about 0.1. A wrong scale of the logits gives several nats."""


def require_agreement(updates: Mapping[str, UpdateResult]) -> None:
    """Raise `BadInput` if the log-probabilities of the first step differ by more than a nat in the mean."""
    found = next(iter(updates.values())).metrics.get("logprob_diff_mean", 0.0)
    if found > _LARGEST_MEAN_NATS:
        raise BadInput(
            "expected engine and policy to agree on the log-probabilities of the first step, found a mean difference "
            f"of {found:.2f} nats: they compute it differently, and it would learn noise. Use another model, or "
            "remove quantization and other changes of the model from rollout.engineArgs"
        )
