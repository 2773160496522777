"""A process that is not part of the job holds much of the GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from rljob_memory.diagnosis import FailureClass
from rljob_testing.ballast import ballast
from rljob_testing.induced_failures.card import take_card
from rljob_testing.induced_failures.catalogue import induces
from rljob_testing.induced_failures.programs.engine import ENGINE_SECONDS, ENGINE_VARIABLES, load_vllm, start_engine
from rljob_testing.induced_failures.programs.training import train


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
