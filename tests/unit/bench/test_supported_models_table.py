"""The recorded table of kinds of models has the kinds that the tests compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.report.markdown import read
from rljob_testing.supported_models import KINDS, LEAST_CHANGE, TOLERANCE, Kind
from rljob_trainer.errors import BadInput
from rljob_trainer.models.trainable import require_trainable
from rljob_trainer.policy.packed_attention import PACKED_KINDS

RECORDED: dict[str, dict[str, Any]] = {row["kind"]: row for row in read("supported_models")["rows"]}
REFUSED = [kind for kind in KINDS if kind.refused is not None]


def test_the_recorded_kinds_are_those_of_the_tests() -> None:
    found = [(row["name"], kind, "refused" in row) for kind, row in RECORDED.items()]
    assert found == [(kind.name, kind.model_type, kind in REFUSED) for kind in KINDS]


def test_every_recorded_kind_that_trains_agrees() -> None:
    for kind, row in RECORDED.items():
        if "refused" not in row:
            assert row["largest_difference"] <= TOLERANCE, kind
            assert row["change_by_update"] >= LEAST_CHANGE, kind
            assert row["packed"] == (kind in PACKED_KINDS), kind


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.model_type)
def test_a_recorded_refusal_is_the_message_of_the_code(kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as raised:
        require_trainable(kind.write(tmp_path))
    assert str(raised.value).replace(str(tmp_path), "DIR") == RECORDED[kind.model_type]["refused"]
