"""A vLLM engine, and a policy in a separate process, as a job has them on one GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rljob_testing.induced_failures.catalogue import NotPossibleHere
from rljob_trainer.models.resolve import resolve_model

ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
ENGINE_SECONDS = 75
# Few parameters, and 32 KiB of keys and values a token: a large KV cache has few blocks to keep books of.
MODEL = "random://qwen3?hidden=256&layers=2&heads=32&kvHeads=32&headDim=128"
_LONGEST_UPDATE_SECONDS = 60


def load_vllm() -> None:
    """Import vLLM before the turn on the GPU: the import takes most of an engine's start."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise NotPossibleHere(f"needs vLLM: {error}") from error


def start_engine(**arguments: Any) -> Any:
    """A `vllm.LLM` of a tiny model with random weights; `arguments` override the defaults."""
    import vllm

    directory = resolve_model(MODEL)
    defaults = {"load_format": "dummy", "enforce_eager": True, "max_num_seqs": 16, "gpu_memory_utilization": 0.01}
    engine = vllm.LLM(model=str(directory), **{**defaults, **arguments})
    print(f"the engine is ready (vLLM {vllm.__version__})", flush=True)
    return engine


class PolicyProcess:
    """A handle on the policy's process."""

    def __init__(self, connection: Connection, process: multiprocessing.process.BaseProcess) -> None:
        self._connection, self._process = connection, process

    def update(self, size_bytes: int) -> None:
        """Run the update of `size_bytes`; returns when it is done or has failed."""
        self._connection.send(size_bytes)
        if not self._connection.poll(_LONGEST_UPDATE_SECONDS):
            raise TimeoutError(f"the policy's update took more than {_LONGEST_UPDATE_SECONDS} s")


@contextmanager
def policy_process(update: Callable[[Path, int], object], folder: Path) -> Iterator[PolicyProcess]:
    """Within, a process runs `update(folder, size_bytes)` on request and keeps the result."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_live, args=(update, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield PolicyProcess(ours, process)
    finally:
        process.kill()


def _live(update: Callable[[Path, int], object], folder: Path, connection: Connection) -> None:
    kept = update(folder, connection.recv())
    connection.send("done")
    connection.recv()
    del kept
