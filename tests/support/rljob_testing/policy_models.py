"""Models of the policy with their weights, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljob_trainer.policy.model import PolicyModel, build_policy_model, sent_name
from rljob_trainer.policy.weight_loading import load_weights


def read_policy_model(model_dir: Path, **settings: Any) -> PolicyModel:
    """The model in `model_dir`. `settings`: as of `build_policy_model`."""
    model = build_policy_model(model_dir, **settings)
    load_weights(model, model_dir, "cpu", sent_name)
    return model
