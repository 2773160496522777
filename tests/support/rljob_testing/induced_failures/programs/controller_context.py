"""Processes of the job that need no GPU, or another one, each have a CUDA context on this GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.card import GIB, gib, take_turn
from rljob_testing.induced_failures.catalogue import NotPossibleHere, induces

POLICY_SHARE = 0.97
"""Share of the GPU that the policy needs; it is free as long as the policy is alone."""


def synchronize_as_a_controller_might() -> None:
    torch.cuda.synchronize()


def multiply_as_a_lost_rank_might() -> None:
    """A rank without `set_device` computes on GPU 0."""
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    del product


@contextmanager
def processes_that(touch_the_gpu: Callable[[], None], count: int) -> Iterator[None]:
    """Within, `count` processes have run the function and are idle. They are forked, so torch is loaded once."""

    def live(connection: Connection) -> None:
        touch_the_gpu()
        connection.send("there")
        connection.recv()

    fork = multiprocessing.get_context("fork")
    with ExitStack() as cleanup:
        connections = []
        for _ in range(count):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=live, args=(theirs,), daemon=True)
            process.start()
            cleanup.callback(process.kill)
            connections.append(ours)
        for connection in connections:
            if not connection.poll(30):
                raise NotPossibleHere("needs a GPU on which a dozen processes can each make a context")
        yield


def train_policy() -> None:
    """Needs `POLICY_SHARE` of the GPU."""
    total_gib = torch.cuda.mem_get_info(0)[1] / GIB
    parts = [gib(1) for _ in range(int(POLICY_SHARE * total_gib))]
    del parts


@induces(FailureClass.CONTROLLER_CONTEXT)
def controllers_that_synchronize(folder: Path) -> None:
    """Each has an empty context."""
    take_turn()
    with processes_that(synchronize_as_a_controller_might, count=12):
        train_policy()


@induces(FailureClass.CONTROLLER_CONTEXT)
def ranks_that_start_on_gpu_0(folder: Path) -> None:
    """Each has a context with cuBLAS."""
    take_turn()
    with processes_that(multiply_as_a_lost_rank_might, count=12):
        train_policy()
