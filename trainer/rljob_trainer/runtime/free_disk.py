"""The free disk at the start of an attempt, compared with what it is predicted to write."""

from __future__ import annotations

from collections.abc import Callable

from rljob_api.job import RLJobSpec
from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.durable_files import free_bytes
from rljob_memory.planning.prediction import Disk
from rljob_memory.sizes import human_bytes
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.output_directory import OutputDirectory


def require_free_disk(
    spec: RLJobSpec, disk: Disk, directory: OutputDirectory, last_step: int, warn: Callable[[str], None]
) -> None:
    """Raise `OutputUnavailable` if a checkpoint and the model cannot fit; warn if those that are kept may not.

    `last_step`: the last committed one. Checkpoints that exist count as written.
    """
    due = -(-max(spec.algorithm.steps - last_step, 0) // spec.checkpoint.every_steps)
    kept = CheckpointStore(directory.checkpoints, spec.checkpoint.keep).count()
    missing, free = max(0, min(due, disk.checkpoints - kept)), free_bytes(directory.path)
    if free >= disk.model_bytes + missing * disk.checkpoint_bytes:
        return
    message = (
        f"{directory.path} has {human_bytes(free)} of free disk; the model is predicted to need "
        f"{human_bytes(disk.model_bytes)}, and {missing} more checkpoints {human_bytes(disk.checkpoint_bytes)} each"
    )
    if free < disk.model_bytes + min(missing, 1) * disk.checkpoint_bytes:
        raise OutputUnavailable(f"the disk is full: {message}. Free some space, or give another --output.")
    warn(f"{message}. Free some space, or lower checkpoint.keep ({spec.checkpoint.keep})")
