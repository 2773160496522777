"""Calls to actors and to agents in pods, with a real Ray: whose failure it is, and which GPUs a role sees."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rljob_client.errors import RunError
from rljob_memory.budget.host import object_store_bytes
from rljob_testing.patience import Deadline
from rljob_trainer.errors import PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.pods.pod_placement import WorkerAgents, mark_controller_exited
from rljob_trainer.pods.ray_node import worker_resource
from rljob_trainer.roles import ray_driver
from rljob_trainer.roles.actor import JOB_VARIABLE, spawn
from rljob_trainer.roles.calls import result_of, serving, wait_for
from rljob_trainer.roles.time_limit import time_limit
from rljob_trainer.rollout.config import SEES_ALL_GPUS

WORKERS = 2
PATIENCE = 300.0


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Its one node stands for the controller's, with a GPU that need not exist, and for those of two workers."""
    workers = {worker_resource(worker): 1 for worker in range(WORKERS)}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CUDA_VISIBLE_DEVICES", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
            patch.setenv(name, "0")
            patch.delenv(name)
        patch.setattr(ray_driver, "connect", partial(ray_driver.connect, resources=workers))
        ray_driver.start_local_ray(cpus=2, gpus=1, object_store_bytes=object_store_bytes(1 << 20, "cpu"))
        yield
        ray.shutdown()


@pytest.fixture
def ranks() -> Iterator[dict[str, Any]]:
    class CalledRank:
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

    ranks = {name: ray.remote(CalledRank).options(num_cpus=1).remote() for name in ("policy-0", "policy-1")}
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


def test_a_lost_actor_explains_the_earlier_errors_of_its_peers(
    ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_trainer.roles.calls._LOST_PEER_SECONDS", 300.0)  # Ray notices later on a busy machine
    with pytest.raises(WorkerLost, match="policy-1 died while updating") as lost:
        wait_for(update(ranks, "die_unnoticed_for", 1.0), "updating")
    assert lost.value.actor == "policy-1"


def test_a_failure_does_not_wait_for_peers_that_never_return(
    ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_trainer.roles.calls._LOST_PEER_SECONDS", 1.0)
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


def test_a_process_is_titled_by_role_and_job_during_and_after_a_call(tmp_path: Path) -> None:
    options = {"num_cpus": 1, "runtime_env": {"env_vars": {JOB_VARIABLE: "sums"}}}
    role = spawn("policy-0", "psutil:Process", tmp_path / "policy-0.log", options)
    try:
        pid = ray.get(role.actor.construct.remote())
        titles = [ray.get(role.cmdline.remote()), psutil.Process(pid).cmdline()]
        # The rest of the former command line is blank.
        assert [" ".join(title).strip() for title in titles] == ["rljob: policy-0 (job sums)"] * 2
    finally:
        ray.kill(role.actor)


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


def test_only_a_role_that_asks_for_a_gpu_sees_one() -> None:
    def visible_gpus() -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    assert visible_gpus() == "", "a stray call in the controller could put a CUDA context on GPU 0"
    role = ray.remote(visible_gpus)
    assert ray.get(role.options(num_gpus=0.5).remote()) == "0"
    assert ray.get(role.options(num_gpus=0).remote()) == ""


def test_a_process_with_peers_sees_their_gpus_after_its_own() -> None:
    def visible_gpus() -> str | None:
        from rljob_trainer.roles.rollout_actor import put_own_gpu_first

        put_own_gpu_first()
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    variables = {SEES_ALL_GPUS: "1", "CUDA_VISIBLE_DEVICES": "2,0,1"}
    task = ray.remote(visible_gpus).options(num_gpus=0.5, runtime_env={"env_vars": variables})
    assert ray.get(task.remote()) == "2,0,1", "Ray's only GPU is the first one of the node"


@pytest.fixture(scope="module")
def agents() -> WorkerAgents:
    agents = WorkerAgents(WORKERS)
    agents.start()
    return agents


def test_each_worker_answers_with_the_process_it_began_with(agents: WorkerAgents) -> None:
    processes = agents.call(os.getpid, PATIENCE)
    assert len(set(processes)) == WORKERS
    assert os.getpid() not in processes
    assert agents.call(os.getpid, PATIENCE) == processes


def test_what_a_function_raises_is_no_lost_worker(agents: WorkerAgents) -> None:
    with pytest.raises(Exception, match="RLJOB_NAME"):
        agents.call(mark_controller_exited, PATIENCE)


def test_a_worker_without_an_agent_is_lost_and_others_answer(agents: WorkerAgents) -> None:
    with pytest.raises(WorkerLost, match=f"worker {WORKERS} did not answer getpid"):
        WorkerAgents(WORKERS + 1).call(os.getpid, PATIENCE)
    processes = WorkerAgents(WORKERS + 1).answers(os.getpid, PATIENCE)
    assert list(processes.values()) == agents.call(os.getpid, PATIENCE)


def test_a_lost_agent_is_not_waited_for_and_starts_again(agents: WorkerAgents) -> None:
    kept, lost = agents.call(os.getpid, PATIENCE)

    def exit_if_lost() -> None:
        if os.getpid() == lost:
            os._exit(1)

    began = time.monotonic()
    with pytest.raises(WorkerLost, match="worker 1 did not answer exit_if_lost"):
        agents.call(exit_if_lost, PATIENCE)
    assert agents.answers(os.getpid, PATIENCE)[0] == kept
    assert time.monotonic() - began < PATIENCE
    deadline = Deadline(PATIENCE)
    while 1 not in (answers := agents.answers(os.getpid, PATIENCE)):
        assert not deadline.passed
    assert answers[0] == kept
    assert answers[1] != lost
