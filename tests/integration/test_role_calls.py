"""Whose failure it is that ends calls to several actors, with a real Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rljob_client.errors import RunError
from rljob_memory.planning.shared_memory import object_store_bytes
from rljob_trainer.errors import PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.roles.calls import result_of, serving, wait_for
from rljob_trainer.roles.ray_driver import start_local_ray
from rljob_trainer.roles.time_limit import time_limit


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    start_local_ray(cpus=2, gpus=0, object_store_bytes=object_store_bytes(1 << 20, "cpu"))
    yield
    ray.shutdown()


@pytest.fixture
def ranks() -> Iterator[dict[str, Any]]:
    class Rank:
        """Defined here, so that Ray sends it to its processes, which cannot import the tests."""

        def is_up(self) -> bool:
            return True

        def lose_the_connection(self) -> None:
            raise RuntimeError("Connection reset by peer")

        def die_unnoticed_for(self, seconds: float) -> None:
            time.sleep(seconds)
            os._exit(1)

        def wait_for_peers(self, seconds: float) -> None:
            time.sleep(seconds)

        def wait_for_file(self, file: Path) -> None:
            while not file.exists():
                time.sleep(0.05)

    ranks = {name: ray.remote(Rank).options(num_cpus=1).remote() for name in ("policy-0", "policy-1")}
    wait_for({name: rank.is_up.remote() for name, rank in ranks.items()}, "starting")
    yield ranks
    for rank in ranks.values():
        ray.kill(rank)


def update(ranks: dict[str, Any], method: str, seconds: float) -> dict[str, Any]:
    """Calls of which policy-0's fails at once, and names no cause; policy-1's is `method`."""
    return {
        "policy-0": ranks["policy-0"].lose_the_connection.remote(),
        "policy-1": getattr(ranks["policy-1"], method).remote(seconds),
    }


def test_a_lost_actor_is_the_cause_of_what_its_peers_say_first(
    ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_trainer.roles.calls._LOST_PEER_SECONDS", 300.0)  # Ray notices later on a busy machine
    with pytest.raises(WorkerLost, match="policy-1 died while updating") as lost:
        wait_for(update(ranks, "die_unnoticed_for", 1.0), "updating")
    assert lost.value.actor == "policy-1"


def test_a_failure_does_not_wait_for_peers_that_never_return(ranks: dict[str, Any]) -> None:
    calls = update(ranks, "wait_for_peers", 600.0)
    with pytest.raises(RunError, match="policy-0 failed while updating: RuntimeError: Connection reset") as failed:
        wait_for(calls, "updating")
    assert failed.value.actor == "policy-0"
    assert not ray.wait([calls["policy-1"]], timeout=0)[0], "the peer is still at it"


def test_a_call_that_hangs_ends_at_the_time_limit(ranks: dict[str, Any]) -> None:
    calls = {name: rank.wait_for_peers.remote(600.0) for name, rank in ranks.items()}
    message = "policy-0, policy-1 did not finish updating within 1 s"
    with time_limit(1), pytest.raises(PhaseDeadlineExceeded, match=message) as late:
        wait_for(calls, "updating")
    assert late.value.actor == "policy-0"


def test_a_run_starts_only_those_processes_of_rays_that_it_uses() -> None:
    commands = ""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # actors of other tests are ending
            commands += " ".join(child.cmdline())
    assert "raylet" in commands
    assert "dashboard.py" not in commands
    assert "monitor.py" not in commands


def test_other_work_is_served_while_the_caller_waits(ranks: dict[str, Any], tmp_path: Path) -> None:
    served_thrice = tmp_path / "served-thrice"

    class Polled:
        def __init__(self) -> None:
            self.served = 0
            self.calls = {"policy-1": ranks["policy-1"].is_up.remote()}

        def pending(self) -> dict[str, Any]:
            return self.calls

        def serve(self, name: str) -> None:
            assert result_of(self.calls.pop(name), name, "polling")
            self.served += 1
            if self.served < 3:
                self.calls = {name: ranks[name].is_up.remote()}
            else:
                served_thrice.touch()

    with serving(polled := Polled()), time_limit(300):
        wait_for({"policy-0": ranks["policy-0"].wait_for_file.remote(served_thrice)}, "updating")
    assert polled.served == 3
    assert wait_for({"policy-1": ranks["policy-1"].is_up.remote()}, "starting") == {"policy-1": True}
