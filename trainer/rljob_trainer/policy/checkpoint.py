"""Checkpoints of policy and optimizer, written while the next steps run. Bit-identical to the state in memory.

There is no other state: the learning rate and the random numbers of a step follow from its number.
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
    """Writes one checkpoint at a time in the background, through its own process group.

    The default group is used for training, and all ranks must run its collectives in the same order.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        # On a GPU the pinned memory is kept: pinning it for each checkpoint would take longer than the copy.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())
        self._writing: Future[Any] | None = None

    def start(self, model: PolicyModel, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        """Copy the state to host memory, and start writing it into `directory`. Collective.

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
        """True if `finish` would return at once."""
        return self._writing is None or self._writing.done()

    def finish(self) -> None:
        """Return when the state is durable. Raises any error of writing it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def load_checkpoint(model: PolicyModel, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Load the state from `directory`. Collective; the number of ranks may differ from that of the writers."""
    state = _state(model, optimizer)
    load(state, storage_reader=FileSystemReader(directory))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: PolicyModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
