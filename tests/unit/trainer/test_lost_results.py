"""Results of calls to actors whose nodes are lost."""

from __future__ import annotations

from typing import NoReturn

import pytest
import ray
from ray.exceptions import ObjectLostError

from rljob_trainer.errors import WorkerLost
from rljob_trainer.roles.calls import result_of


def test_a_result_that_is_lost_with_its_node_is_that_of_a_lost_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps a large result in the memory of the actor's node, and reports the call as complete."""

    def get(_reference: object) -> NoReturn:
        raise ObjectLostError("00", None, "")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(WorkerLost, match="rollout-1 died while generating") as lost:
        result_of("reference", "rollout-1", "generating")
    assert lost.value.actor == "rollout-1"
