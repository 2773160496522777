"""The free disk is compared with the prediction before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.job import RLJobSpec
from rljob_client.errors import OutputUnavailable
from rljob_memory.planning.disk import Disk
from rljob_memory.sizes import GIB
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.runtime import free_disk

SPEC = RLJobSpec.model_validate(
    {
        "model": {"uri": "random://qwen3"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 8},
        "checkpoint": {"everySteps": 1, "keep": 2},
    }
)
DISK = Disk(checkpoint_bytes=10 * GIB, checkpoints=3, model_bytes=2 * GIB, cache_bytes=0, compiled_bytes=0)


@pytest.mark.parametrize(
    ("free_gib", "kept", "last_step", "outcome"),
    [
        (32, 0, 0, None),
        (31, 0, 0, "3 more checkpoints 10.00 GiB each. Free some space, or lower checkpoint.keep (2)"),
        (12, 2, 2, None),  # the one that is written before an old one is removed
        (11, 0, 0, "the disk is full: "),
        (11, 2, 2, "the disk is full: "),
        (12, 0, 7, None),
        (2, 2, 8, None),  # only the model
        (1, 2, 8, "the disk is full: "),
    ],
)
def test_free_disk_is_compared_with_the_files_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, kept: int, last_step: int, outcome: str | None
) -> None:
    directory = OutputDirectory(tmp_path)
    for step in range(kept):
        (directory.checkpoints / f"step-{step + 1:06d}").mkdir(parents=True)
    monkeypatch.setattr(free_disk, "free_bytes", lambda _path: free_gib * GIB)
    told: list[str] = []
    try:
        free_disk.require_free_disk(SPEC, DISK, directory, last_step, told.append)
    except OutputUnavailable as error:
        assert outcome == "the disk is full: "
        told.append(str(error))
    assert len(told) == (outcome is not None)
    assert outcome is None or outcome in told[0]
