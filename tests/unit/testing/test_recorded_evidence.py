"""Small copies of evidence for tests/data/oom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import read_evidence
from rljob_testing.induced_failures.recorded_evidence import LARGEST_LOG_CHARACTERS, MOST_SAMPLES, pack

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 3.27 GiB is free. Including non-PyTorch memory, this process has 136.53 GiB memory in use. Of the "
    "allocated memory 27.20 GiB is allocated by PyTorch, and 108.80 GiB is reserved by PyTorch but unallocated."
)
TRACEBACK = f"""Traceback (most recent call last):
  File "/somewhere/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1, in _call_impl
    return forward_call(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{MESSAGE}
"""


def failure(folder: Path, log: str, samples: int = 0) -> Path:
    directory = folder / "Fragmentation" / "some_program"
    (directory / "logs").mkdir(parents=True)
    (directory / "logs" / "program.log").write_text(log)
    if samples:
        (directory / "memory").mkdir()
        lines = [json.dumps({"allocated": 10, "reserved": 20, "device_total": 30, "step": i}) for i in range(samples)]
        (directory / "memory" / "policy-0.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_a_failure_with_only_a_log_becomes_one_text_file(tmp_path: Path) -> None:
    copy = pack(failure(tmp_path, TRACEBACK), tmp_path / "recorded", "a program")
    assert copy == tmp_path / "recorded" / "Fragmentation" / "induced-some-program.txt"
    text = copy.read_text()
    assert text.startswith("# source: made on one ")
    assert text.partition("\n")[0].endswith(", by a program")
    assert str(diagnose(read_evidence(copy))[0].failure_class) == "Fragmentation"


def test_a_failure_with_samples_keeps_a_folder_with_the_latest(tmp_path: Path) -> None:
    copy = pack(failure(tmp_path, TRACEBACK, samples=100), tmp_path / "recorded", "a program")
    kept = (copy / "memory" / "policy-0.jsonl").read_text().splitlines()
    assert len(kept) == MOST_SAMPLES
    assert json.loads(kept[-1])["step"] == 99
    assert (copy / "source.txt").read_text().startswith("# source: made ")


def test_a_long_log_is_cut_in_the_middle_with_the_same_diagnosis(tmp_path: Path) -> None:
    chatter = "".join(f"INFO line {number} of an engine that starts\n" for number in range(2_000))
    copy = pack(failure(tmp_path, chatter + TRACEBACK), tmp_path / "recorded", "a program")
    text = copy.read_text()
    assert len(text) < LARGEST_LOG_CHARACTERS * 1.1
    assert "INFO line 0 " in text
    assert MESSAGE in text


def test_no_path_or_address_of_the_machine_is_kept(tmp_path: Path) -> None:
    text = pack(failure(tmp_path, TRACEBACK), tmp_path / "recorded", "a program").read_text()
    assert "/somewhere" not in text
    assert 'File "/opt/venv/lib/python3/site-packages/torch/nn/modules/module.py"' in text


def test_a_copy_with_another_diagnosis_is_refused(tmp_path: Path) -> None:
    chatter = "".join(f"INFO line {number} of what came afterwards\n" for number in range(2_000))
    log = chatter + TRACEBACK + chatter
    with pytest.raises(ValueError, match="and its small copy as"):
        pack(failure(tmp_path, log), tmp_path / "recorded", "a program")
