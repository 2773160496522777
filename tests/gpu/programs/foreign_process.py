"""A process that is no part of the job holds much of the GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from rljob_memory.diagnosis import FailureClass
from tests.gpu.ballast import ballast
from tests.gpu.programs.card import take_card
from tests.gpu.programs.catalogue import induces
from tests.gpu.programs.engine import ENGINE_SECONDS, ENGINE_VARIABLES, load_vllm, start_engine
from tests.gpu.programs.training import train


@induces(FailureClass.FOREIGN_PROCESS)
def a_neighbour_from_the_start(folder: Path) -> None:
    """It was there before the job."""
    card = take_card()
    with ballast(hold_bytes=int(0.7 * card.total_bytes)):
        train(int(0.5 * card.total_bytes))


@induces(FailureClass.FOREIGN_PROCESS)
def a_neighbour_that_comes_later(folder: Path) -> None:
    """The same steps went well before it came."""
    card = take_card()
    train(int(0.5 * card.total_bytes), steps=3)
    torch.cuda.empty_cache()
    with ballast(hold_bytes=int(0.7 * card.total_bytes)):
        train(int(0.5 * card.total_bytes))


@induces(FailureClass.FOREIGN_PROCESS, seconds=ENGINE_SECONDS, variables=ENGINE_VARIABLES)
def a_neighbour_before_the_engine(folder: Path) -> None:
    """The engine finds less free memory than its share at its start."""
    load_vllm()
    card = take_card()
    with ballast(hold_bytes=int(0.5 * card.total_bytes)):
        start_engine(gpu_memory_utilization=0.8)
