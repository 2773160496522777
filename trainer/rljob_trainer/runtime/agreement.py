"""Checks of an update: engine and policy must compute the same probabilities in the first step of a run, and a replayed
step must apply the same updates as before."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rljob_client.errors import BadInput
from rljob_client.run_directory.records import StepRecord
from rljob_trainer.policy.result import UpdateResult

_LARGEST_MEAN_NATS = 1.0
"""bfloat16 gives 0.01 to 0.05 nats, an engine in 8 bits about 0.1. A wrong scale of the logits gives several nats."""


def require_agreement(updates: Mapping[str, UpdateResult]) -> None:
    """Raise `BadInput` if the log-probabilities of the first step are not finite, or differ by more than a nat in the
    mean. NaN differs."""
    metrics = next(iter(updates.values())).metrics
    found = metrics.get("logprob_diff_mean", 0.0)
    dropped, tokens = metrics.get("dropped_tokens", 0.0), metrics.get("tokens", 0.0)
    if not math.isfinite(found) or (dropped > 0 and not dropped < tokens):
        raise BadInput(
            f"expected finite log-probabilities in the first step, found a mean difference of {found} nats between "
            f"engine and policy, and {dropped:.0f} of {tokens:.0f} response tokens without a finite log-probability "
            "from the engine: the model overflows, or its files are damaged. Write model.dtype: float32; if that does "
            "not help, use another model"
        )
    if not found <= _LARGEST_MEAN_NATS:
        raise BadInput(
            "expected engine and policy to agree on the log-probabilities of the first step, found a mean difference "
            f"of {found:.2f} nats: they compute it differently, and it would learn noise. Use another model, or "
            "remove quantization and other changes of the model from rollout.engineArgs"
        )


def require_same_updates(committed: StepRecord, updates: Mapping[str, UpdateResult]) -> None:
    """Raise `BadInput` if the replay of a committed step skipped another number of updates than the step itself."""
    before = committed.metrics.get("skipped_updates", 0.0)
    found = next(iter(updates.values())).metrics.get("skipped_updates", 0.0)
    if found != before:
        raise BadInput(
            f"expected the replay of step {committed.step} to skip {before:.0f} updates whose gradient is not finite, "
            f"as before, found {found:.0f}: the restored weights are damaged. If checkpoints has an older directory, "
            "delete the newest one to resume from it; otherwise start over in another output directory"
        )
