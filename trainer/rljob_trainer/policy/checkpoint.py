"""Checkpoints of policy and optimizer, written while the next steps run. Bit-identical to the state in memory.

They hold float32 masters and the moments, by parameter, so that they depend neither on the number of ranks nor on the
memory plan; only the scales of moments in 8 bits are by rank (`checkpoint_layout`). There is no other state: the
learning rate and the random numbers of a step follow from its number.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_client.errors import BadInput, RunError
from rljob_trainer.ledger.checkpoint_manifest import CheckpointManifest, FileDigest
from rljob_trainer.policy.checkpoint_files import DamagedCheckpoint, ParallelWriter, VerifyingReader
from rljob_trainer.policy.checkpoint_layout import (
    STATE,
    LoadIntoState,
    LocalState,
    SaveInPieces,
    as_saved,
    local_state,
    receive_scales,
    take_scales,
)
from rljob_trainer.policy.host_array import HostArray, parts_bytes, parts_like
from rljob_trainer.policy.membership import forget_locals
from rljob_trainer.policy.moments import MOMENTS
from rljob_trainer.policy.optimizer import MasterAdamW
from rljob_trainer.policy.optimizer_state import QUANTIZED

_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", QUANTIZED: "int8"}
"""`policy.optimizer.moments` by the dtype of the saved moments."""
_LEAVE_SECONDS = 20.0
"""A write whose ranks have left their group fails at its next piece, unless it waits for the disk."""


class CheckpointWriter:
    """Writes one checkpoint at a time in the background, through its own process group.

    The default group is used for training, and all ranks must run its collectives in the same order.
    """

    def __init__(self, *, copies: bool) -> None:
        """`copies`: the host has room for a copy of the state."""
        self.copies = copies
        self.in_place = False
        """The latest checkpoint is written from where the state is: `wait_until_written` before that changes."""
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self._left = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # On a GPU the memory is kept: pinning it for each checkpoint would take longer than the copy.
        self._kept: HostArray | None = None
        self._writing: Future[dict[str, FileDigest]] | None = None

    def start(self, optimizer: MasterAdamW, directory: Path) -> None:
        """Start writing the state into `directory`. Collective.

        It is copied to host memory first if there is room for that, and may then change at once. Raises `RuntimeError`
        while another checkpoint is being written.
        """
        if self._writing is not None:
            raise RuntimeError("expected the previous checkpoint to be finished, found it still being written")
        state = local_state(optimizer)
        memory = self._memory(parts_bytes(_tensors(state)), of_device=optimizer.state.on_device)
        self.in_place = memory is None
        if memory is not None:
            state = _copied(state, memory)
        self._writing = self._executor.submit(
            self._write,
            as_saved(optimizer, state),
            SaveInPieces(state, in_place=self.in_place),
            ParallelWriter(directory, self._left),
            self._group,
        )

    def allow_copies(self, allowed: bool) -> None:
        """Enable or disable copies of the state. If disabled, releases the memory of the copy once it is written."""
        if self.copies and not allowed:
            self.wait_until_written()
            self.release()
        self.copies = allowed

    def release(self) -> None:
        """Release the memory of the copy. Does nothing while a checkpoint is being written."""
        if self.written():
            self._kept = None

    def leave_group(self) -> None:
        """Drop the process group, after a failure. A checkpoint in progress fails: no rank completes it alone."""
        self._group = None
        self._left.set()

    def renew_group(self) -> None:
        """Use a process group of a new default group, after `leave_group`. Collective. Drops the former checkpoint.

        Raises `RuntimeError` if its write does not end.
        """
        writing, self._writing = self._writing, None
        if writing is not None and wait([writing], timeout=_LEAVE_SECONDS).not_done:
            raise RuntimeError(f"expected an interrupted checkpoint to end within {_LEAVE_SECONDS:.0f} s, it did not")
        self._group = dist.new_group(backend="gloo")
        self._left = threading.Event()

    def wait_until_written(self) -> None:
        """Return when no checkpoint is being written. Its error, if any, is raised by `finish`."""
        if self._writing is not None:
            wait([self._writing])

    def written(self) -> bool:
        """True if `finish` would return at once."""
        return self._writing is None or self._writing.done()

    def finish(self) -> dict[str, FileDigest]:
        """Wait until the state is durable. Returns the digests of this rank's files by name. Raises any error of
        writing them."""
        writing, self._writing = self._writing, None
        return {} if writing is None else writing.result()

    @staticmethod
    def _write(
        state: dict[str, Any], planner: SaveInPieces, writer: ParallelWriter, group: dist.ProcessGroup | None
    ) -> dict[str, FileDigest]:
        try:
            save(state, storage_writer=writer, planner=planner, process_group=group)
        except BaseException as error:
            # Kept by the future, they would keep the group's connections open, on which other ranks wait for this one.
            forget_locals(error)
            group = None
            raise
        return writer.digests

    def _memory(self, nbytes: int, *, of_device: bool) -> Tensor | None:
        """Memory for a copy of the state; None if there is none. `of_device`: part of the state is on a device."""
        if not self.copies:
            return None
        if not torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8)
        if self._kept is None or self._kept.nbytes < nbytes:
            self._kept = None  # first, so that both do not exist at once
            self._kept = HostArray(
                nbytes,
                torch.uint8,
                pinned=of_device,
                purpose="a copy of the policy's state for checkpoints",
                advice="leave it as it is: checkpoints are written without a copy, and the next optimizer step waits",
            )
        try:
            return self._kept.tensor
        except RuntimeError as error:
            print(f"checkpoints are written without a copy: {error}", file=sys.stderr, flush=True)
            self.copies, self._kept = False, None
            return None


def _copied(state: LocalState, memory: Tensor) -> LocalState:
    """The state in `memory`, which may change at once."""
    copies = iter(parts_like(_tensors(state), memory))
    copied = {
        name: {key: next(copies).copy_(value, non_blocking=True) for key, value in each.items()}
        for name, each in state.items()
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copied


def _tensors(state: LocalState) -> Iterator[Tensor]:
    for each in state.values():
        yield from each.values()


def load_checkpoint(optimizer: MasterAdamW, directory: Path, rank: int, ranks: int) -> str | None:
    """Load the state from `directory`. Collective; the number of ranks may differ from that of the writers.

    Returns None, or a description of damage to the files: the state is then partly loaded on every rank. Raises
    `BadInput` if it is the state of another optimizer or of other parameters, or has moments of another type.
    """
    reader = VerifyingReader(directory, CheckpointManifest.load(directory).files, rank, ranks)
    saved = reader.read_metadata().state_dict_metadata
    own = local_state(optimizer)
    state = as_saved(optimizer, own)
    _require_same_moments(optimizer, saved, directory)
    _require_same_state(state, saved, directory)
    receive_scales(optimizer, state["optimizer"]["state"], saved)
    try:
        load(state, storage_reader=reader, planner=LoadIntoState(own))
    except CheckpointException as failed:
        failures = {number: error for number, (error, _) in failed.failures.items()}
        damages = [str(error) for error in failures.values() if isinstance(error, DamagedCheckpoint)]
        if damages:
            return damages[0]
        raise _of_rank(rank, failures) from failed
    take_scales(optimizer, state["optimizer"]["state"])
    optimizer.steps = max((int(each["step"]) for each in state["optimizer"]["state"].values()), default=0)
    return None


def _of_rank(rank: int, failures: Mapping[int, BaseException]) -> BaseException:
    """This rank's own failure to load, or a report of another's."""
    if rank in failures:
        return failures[rank]
    other, error = next(iter(failures.items()))
    if isinstance(error, RunError):
        return error
    return RuntimeError(f"rank {other} could not load the checkpoint: {type(error).__name__}: {error}")


def _require_same_moments(optimizer: MasterAdamW, saved: Mapping[str, Any], directory: Path) -> None:
    metadata = saved.get(f"{STATE}{next(iter(optimizer.parameters))}.{MOMENTS[0]}")
    if not isinstance(metadata, TensorStorageMetadata) or metadata.properties.dtype == optimizer.moments.dtype:
        return
    found = _TYPES.get(metadata.properties.dtype, str(metadata.properties.dtype))
    raise BadInput(
        f"expected AdamW's moments as {_TYPES[optimizer.moments.dtype]} in the checkpoint {directory}, found {found}: "
        f"write policy.optimizer.moments: {found}, or begin in another output directory"
    )


def _require_same_state(state: dict[str, Any], saved: Mapping[str, Any], directory: Path) -> None:
    wanted = set(_names(state))
    if missing := sorted(wanted - saved.keys()):
        raise BadInput(
            f"expected the trained weights and AdamW's moments of this job in the checkpoint {directory}, found "
            f"{len(missing)} missing ({', '.join(missing[:2])}); it belongs to another model or optimizer: write the "
            "settings that it was made with, or begin in another output directory"
        )


def _names(state: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
