"""How a run's own Ray is started."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from rljob_trainer.errors import WorkerLost
from rljob_trainer.roles import ray_driver


@pytest.mark.parametrize(
    ("said", "raised"),
    [("The current node timed out during startup. This could happen", WorkerLost), ("something else", Exception)],
)
def test_a_ray_that_is_too_slow_is_worth_another_attempt(
    monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception]
) -> None:
    def init(**_: Any) -> None:
        raise Exception(said)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_driver, "_LOCAL_ENVIRONMENT", {})
    with pytest.raises(Exception, match=r"busy|else") as found:
        ray_driver.start_local_ray(cpus=1, gpus=0, object_store_bytes=1)
    assert type(found.value) is raised
