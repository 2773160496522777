"""Failures because of other processes on the GPU, or without a visible cause."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rljob_memory.diagnosis import FailureClass
from rljob_testing.ballast import LARGEST_CHUNK_BYTES, CudaDriver, ballast
from rljob_testing.induced_failures.card import GIB, gib, take_card, take_turn
from rljob_testing.induced_failures.catalogue import NotPossibleHere, induces
from rljob_testing.induced_failures.programs.engines import (
    ENGINE_SECONDS,
    ENGINE_VARIABLES,
    load_vllm,
    start_engine,
    train,
)

# A process that is not part of the job holds much of the GPU.


@induces(FailureClass.FOREIGN_PROCESS)
def a_neighbour_from_the_start(folder: Path) -> None:
    """It ran before the job."""
    card = take_card()
    with ballast(hold_bytes=int(0.7 * card.total_bytes)):
        train(int(0.5 * card.total_bytes))


@induces(FailureClass.FOREIGN_PROCESS)
def a_neighbour_that_comes_later(folder: Path) -> None:
    """The same steps succeeded before it started."""
    card = take_card()
    train(int(0.5 * card.total_bytes), steps=3)
    torch.cuda.empty_cache()
    with ballast(hold_bytes=int(0.7 * card.total_bytes)):
        train(int(0.5 * card.total_bytes))


@induces(FailureClass.FOREIGN_PROCESS, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def a_neighbour_before_the_engine(folder: Path) -> None:
    """The engine finds less free memory than its share when it starts."""
    load_vllm()
    card = take_card()
    with ballast(hold_bytes=int(0.5 * card.total_bytes)):
        start_engine(gpu_memory_utilization=0.8)


# Processes of the job that need no GPU, or another one, each have a CUDA context on this GPU.


SHARE_OF_THE_POLICY = 0.97
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
    """Needs `SHARE_OF_THE_POLICY` of the GPU."""
    total_gib = torch.cuda.mem_get_info(0)[1] / GIB
    parts = [gib(1) for _ in range(int(SHARE_OF_THE_POLICY * total_gib))]
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


# Failures without numbers and without a place, from which no cause can be inferred.


@induces(FailureClass.UNKNOWN)
def a_request_past_torch(folder: Path) -> None:
    """A library calls the CUDA driver directly, in addition to tensors that fill the GPU."""
    tensors = [gib(1) for _ in range(int(take_card().free_gib) - 1)]
    CudaDriver().allocate(4 * LARGEST_CHUNK_BYTES)
    del tensors


@induces(FailureClass.UNKNOWN)
def a_context_on_a_full_card(folder: Path) -> None:
    """A process starts on a full GPU: not even its CUDA context fits."""
    take_turn()
    with ballast(leave_bytes=64 << 20):
        torch.zeros(1, device="cuda")
