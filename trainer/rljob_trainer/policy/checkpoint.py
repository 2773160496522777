"""Checkpoints of policy and optimizer, written while the next steps run. Bit-identical to the state in memory.

They hold float32 masters and the moments, by parameter, so that they depend neither on the number of ranks nor on the
memory plan. There is no other state: the learning rate and the random numbers of a step follow from its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rljob_trainer.errors import BadInput
from rljob_trainer.policy.gradients import local
from rljob_trainer.policy.host_array import HostArray
from rljob_trainer.policy.optimizer import MasterAdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LEAVE_SECONDS = 20.0
"""A write that its peers have left fails at once, unless it waits for the disk."""

_WEIGHTS = "model."
"""Prefix of the weights' names in a checkpoint."""


class CheckpointWriter:
    """Writes one checkpoint at a time in the background, through its own process group.

    The default group is used for training, and all ranks must run its collectives in the same order.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # On a GPU the memory is kept: pinning it for each checkpoint would take longer than the copy.
        self._kept: HostArray | None = None
        self._writing: Future[Any] | None = None

    def start(self, optimizer: MasterAdamW, directory: Path) -> Future[Any]:
        """Start writing the state into `directory`. Collective. Returns the end of the writing, durable or failed.

        State on the device is copied to host memory first. An offloaded state leaves no room for a copy there: all is
        written from where it is, so `wait_until_written` before it changes. Raises `RuntimeError` while another
        checkpoint is being written.
        """
        if self._writing is not None:
            raise RuntimeError("expected the previous checkpoint to be finished, found it still being written")
        in_place = optimizer.state.offloaded
        self._writing = self._executor.submit(
            save,
            _as_saved(optimizer, _in_place(optimizer) if in_place else self._staged(optimizer)),
            storage_writer=FileSystemWriter(directory, sync_files=True),
            planner=_MastersOnDemand(optimizer) if in_place else None,
            process_group=self._group,
        )
        return self._writing

    def leave_group(self) -> None:
        """Drop the process group, after a failure. A checkpoint in progress fails."""
        self._group = None

    def renew_group(self) -> None:
        """Use a process group of a new default group, after `leave_group`. Collective. Drops the former checkpoint."""
        writing, self._writing = self._writing, None
        if writing is not None and wait([writing], timeout=_LEAVE_SECONDS).not_done:
            raise RuntimeError(f"expected an interrupted checkpoint to end within {_LEAVE_SECONDS:.0f} s, it did not")
        self._group = dist.new_group(backend="gloo")

    def wait_until_written(self) -> None:
        """Return when no checkpoint is being written. Its error, if any, is raised by `finish`."""
        if self._writing is not None:
            wait([self._writing])

    def written(self) -> bool:
        """True if `finish` would return at once."""
        return self._writing is None or self._writing.done()

    def finish(self) -> None:
        """Return when the state is durable. Raises any error of writing it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _staged(self, optimizer: MasterAdamW) -> dict[str, dict[str, Tensor]]:
        """This rank's part of the state, in host memory, by parameter."""
        staged: dict[str, dict[str, Tensor]] = {}
        free = self._memory(_staged_bytes(optimizer))
        for name, parameter in optimizer.parameters.items():
            shard, moments = local(parameter), optimizer.state_of(name)
            master, free = _take(free, shard.shape, torch.float32)
            for piece, values in optimizer.master_pieces(name):
                master.view(-1)[piece].copy_(values, non_blocking=True)
            staged[name] = {"master": master}
            for key in _MOMENTS:
                target, free = _take(free, shard.shape, moments[key].dtype)
                staged[name][key] = target.copy_(moments[key], non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged

    def _memory(self, nbytes: int) -> Tensor:
        if not torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8)
        if self._kept is None or self._kept.nbytes < nbytes:
            self._kept = None  # first, so that both do not exist at once
            self._kept = HostArray(nbytes, torch.uint8, pinned=True)
        return self._kept.tensor


class _MastersOnDemand(DefaultSavePlanner):
    """Forms the masters of bfloat16 weights one by one, when they are written."""

    def __init__(self, optimizer: MasterAdamW) -> None:
        super().__init__()
        self._optimizer = optimizer

    def lookup_object(self, index: MetadataIndex) -> Any:
        name = index.fqn.removeprefix(_WEIGHTS)
        if index.fqn.startswith(_WEIGHTS) and self._optimizer.is_split(name):
            return self._optimizer.master_on_host(name)
        return super().lookup_object(index)


def _in_place(optimizer: MasterAdamW) -> dict[str, dict[str, Tensor]]:
    """The state where it is, by parameter. A split master has the shape alone: `_MastersOnDemand` forms it."""
    values: dict[str, dict[str, Tensor]] = {}
    for name, parameter in optimizer.parameters.items():
        shard, moments = local(parameter), optimizer.state_of(name)
        master = torch.empty((), dtype=torch.float32).expand(shard.shape) if optimizer.is_split(name) else shard
        values[name] = {"master": master, **{key: moments[key] for key in _MOMENTS}}
    return values


def load_checkpoint(optimizer: MasterAdamW, directory: Path) -> None:
    """Load the state from `directory`. Collective; the number of ranks may differ from that of the writers.

    Raises `BadInput` if it is the state of another optimizer or of other parameters.
    """
    values: dict[str, dict[str, Tensor]] = {}
    for name, parameter in optimizer.parameters.items():
        moments = optimizer.state_of(name)
        master = local(parameter)
        if master.dtype != torch.float32:
            master = torch.empty(master.shape, dtype=torch.float32)
        values[name] = {"master": master, **{key: moments[key] for key in _MOMENTS}}
    state = _as_saved(optimizer, values)
    _require_same_state(state, directory)
    load(state, storage_reader=FileSystemReader(directory))
    for name, parameter in optimizer.parameters.items():
        if parameter.dtype != torch.float32:
            optimizer.set_master(name, values[name]["master"])
    optimizer.steps = max((int(each["step"]) for each in state["optimizer"]["state"].values()), default=0)


def _as_saved(optimizer: MasterAdamW, values: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """The state by the names that it has in a checkpoint. Shares the memory of `values`."""
    cpu_mesh: list[DeviceMesh] = []

    def placed(name: str, shard: Tensor) -> Tensor:
        parameter = optimizer.parameters[name]
        if not isinstance(parameter, DTensor):
            return shard
        mesh = parameter.device_mesh
        if shard.device.type != mesh.device_type:
            if not cpu_mesh:
                cpu_mesh.append(DeviceMesh("cpu", mesh.mesh, _init_backend=False))
            mesh = cpu_mesh[0]
        return DTensor.from_local(
            shard, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    state = {
        name: {
            **{key: placed(name, each[key]) for key in _MOMENTS},
            "step": torch.tensor(float(optimizer.steps)),
        }
        for name, each in values.items()
    }
    return {
        "model": {name: placed(name, each["master"]) for name, each in values.items()},
        "optimizer": {"state": state},
    }


def _require_same_state(state: dict[str, Any], directory: Path) -> None:
    saved = FileSystemReader(directory).read_metadata().state_dict_metadata
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


def _staged_bytes(optimizer: MasterAdamW) -> int:
    moments = (optimizer.state.arrays().exp_avg.dtype,) * len(_MOMENTS)
    shards = [local(parameter).numel() for parameter in optimizer.parameters.values()]
    return sum(_aligned(elements * dtype.itemsize) for elements in shards for dtype in (torch.float32, *moments))


def _take(free: Tensor, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in the first bytes of `free`, and the rest."""
    nbytes = shape.numel() * dtype.itemsize
    return free[:nbytes].view(dtype).view(shape), free[_aligned(nbytes) :]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
