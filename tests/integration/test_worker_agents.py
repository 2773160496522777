"""Functions that the controller runs in the workers' pods, with a real Ray whose one node stands for both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import ray

from rljob_memory.planning.shared_memory import object_store_bytes
from rljob_testing.patience import Deadline
from rljob_trainer.errors import WorkerLost
from rljob_trainer.pods.ray_node import worker_resource
from rljob_trainer.pods.worker_agents import WorkerAgents, mark_controller_exited
from rljob_trainer.roles.ray_driver import STARTS, RayDied, change_start_of_raylets, connect

WORKERS = 2
PATIENCE = 300.0


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    change_start_of_raylets()
    for start in range(1, STARTS + 1):
        try:
            connect(
                "local",
                num_cpus=0,
                resources={worker_resource(worker): 1 for worker in range(WORKERS)},
                object_store_memory=object_store_bytes(1 << 20, "cpu"),
                include_dashboard=False,
            )
            break
        except RayDied:  # as `start_local_ray`, which has no option for resources
            if start == STARTS:
                raise
    yield
    ray.shutdown()


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


def test_a_worker_without_an_agent_is_lost() -> None:
    with pytest.raises(WorkerLost, match=f"worker {WORKERS} exited before getpid"):
        WorkerAgents(WORKERS + 1).call(os.getpid, PATIENCE)


def test_the_answers_of_others_come_without_that_of_a_missing_agent(agents: WorkerAgents) -> None:
    processes = WorkerAgents(WORKERS + 1).answers(os.getpid, PATIENCE)
    assert list(processes.values()) == agents.call(os.getpid, PATIENCE)


def test_a_lost_agent_is_not_waited_for_and_starts_again(agents: WorkerAgents) -> None:
    kept, lost = agents.call(os.getpid, PATIENCE)

    def exit_if_lost() -> None:
        if os.getpid() == lost:
            os._exit(1)

    began = time.monotonic()
    with pytest.raises(WorkerLost, match="exit_if_lost"):
        agents.call(exit_if_lost, PATIENCE)
    assert agents.answers(os.getpid, PATIENCE)[0] == kept
    assert time.monotonic() - began < PATIENCE
    deadline = Deadline(PATIENCE)
    while 1 not in (answers := agents.answers(os.getpid, PATIENCE)):
        assert not deadline.passed
    assert answers[0] == kept
    assert answers[1] != lost
