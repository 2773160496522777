"""The file system of a model tells if its files are in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_trainer.models.files_in_memory import is_in_memory

MOUNTS = """overlay / overlay rw 0 0
tmpfs /dev tmpfs rw 0 0
shm /dev/shm tmpfs rw,size=1000k 0 0
/dev/sda1 /models ext4 rw 0 0
tmpfs /models/with\\040space tmpfs rw 0 0
tmpfs /covered tmpfs rw 0 0
/dev/sdb1 /covered xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("/dev/shm/model", True),
        ("/models/qwen", False),
        ("/models/with space/qwen", True),
        ("/covered/qwen", False),
        ("/home/model", False),
    ],
)
def test_the_file_system_of_the_nearest_mount_counts(directory: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert is_in_memory(Path(directory), tmp_path / "mounts") is expected


def test_without_a_table_nothing_is_known_to_be_in_memory(tmp_path: Path) -> None:
    assert not is_in_memory(tmp_path, tmp_path / "missing")
