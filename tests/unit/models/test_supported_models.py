"""Kinds of models that are refused by name, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_client.errors import BadInput
from rljob_testing.supported_models import KINDS, Kind
from rljob_trainer.models.lora_targets import adapted_layers, described_layers
from rljob_trainer.models.trainable import require_trainable, require_trainable_settings
from rljob_trainer.policy.packed_attention import PACKED_KINDS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.model_type)
def test_a_kind_is_refused_by_name_or_trains(kind: Kind, tmp_path: Path) -> None:
    kind.write(tmp_path)
    if kind.refused is None:
        require_trainable(tmp_path)
        assert described_layers(tmp_path) == adapted_layers(tmp_path, (), 1)
        return
    with pytest.raises(BadInput, match=kind.refused):
        require_trainable(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=kind.refused):
        require_trainable_settings(tmp_path)


def test_every_packed_kind_is_compared() -> None:
    assert {kind.model_type for kind in KINDS} >= PACKED_KINDS
