"""The state of policy and optimizer on disk, written while the next steps run. Bit for bit what was in memory.

There is no other state: the learning rate and the random numbers of a step follow from the step's number.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from rljob_trainer.policy.model import PolicyModel


class CheckpointWriter:
    """Writes one checkpoint at a time in the background, through a process group of its own.

    The default group is busy with the training's collectives, whose order on the ranks must not be disturbed.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        # On a GPU it keeps its pinned memory: to pin that much anew for each checkpoint would take longer than to copy.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self._writing: Future[Any] | None = None

    def start(self, model: PolicyModel, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        """Copy the state to host memory, and begin to write it into `directory`. All ranks call it.

        Raises `RuntimeError` while another checkpoint is being written.
        """
        if self._writing is not None:
            raise RuntimeError("expected the previous checkpoint to be finished, found it still being written")
        upload = async_save(
            _state(model, optimizer),
            storage_writer=FileSystemWriter(directory, sync_files=True),
            process_group=self._group,
            async_stager=self._stager,
        )
        self._writing = upload if isinstance(upload, Future) else upload.upload_completion

    def written(self) -> bool:
        """Whether `finish` would return at once."""
        return self._writing is None or self._writing.done()

    def finish(self) -> None:
        """Return when the state is durable. Raises what went wrong while it was written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def load_checkpoint(model: PolicyModel, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Set the state to that of `directory`. All ranks call it; they may be other in number than those that wrote it."""
    state = _state(model, optimizer)
    load(state, storage_reader=FileSystemReader(directory))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: PolicyModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
