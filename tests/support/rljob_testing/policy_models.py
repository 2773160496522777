"""Models of the policy with their weights, on the CPU, and the masters of trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rljob_trainer.policy.model import PolicyModel, build_policy_model, sent_name
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.policy.optimizer_state import joined
from rljob_trainer.policy.weight_loading import load_weights


def read_policy_model(model_dir: Path, **settings: Any) -> PolicyModel:
    """The model in `model_dir`. `settings`: those of `build_policy_model`."""
    model = build_policy_model(model_dir, **settings)
    load_weights(model, model_dir, "cpu", sent_name)
    return model


def master_of(optimizer: MasterAdamW, name: str) -> Tensor:
    """The float32 master of this rank's shard of a parameter, in its shape."""
    weights, remainders = optimizer.weights_of(name), optimizer.state_of(name).get("remainders")
    return weights if remainders is None else joined(weights, remainders.to(weights.device))
