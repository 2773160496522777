"""Reports that are cut, out of order or spread over ranks: what is next to a message explains it."""

from __future__ import annotations

from io import BytesIO

import pytest

from rljob_memory.diagnosis import FailureClass, diagnose
from rljob_memory.evidence import FailureKind
from rljob_memory.evidence.activity import Activity
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader

SIZES = (
    "GPU {gpu} has a total capacity of 79.33 GiB of which 49.81 MiB is free. Process 415 has 79.27 GiB memory in use. "
    "Of the allocated memory {allocated} GiB is allocated by PyTorch, and 150.18 MiB is reserved by PyTorch but "
    "unallocated."
)
MESSAGE = "CUDA out of memory. Tried to allocate 56.00 MiB. " + SIZES.format(gpu=5, allocated=77.92)
OOM = "torch.OutOfMemoryError: " + MESSAGE
TRACEBACK = """Traceback (most recent call last):
  File "/app/sft.py", line 110, in fit
    self.strategy.optimizer_step(self.optimizer)
  File "/app/strategy.py", line 154, in optimizer_step
    optimizer.step()
"""
LOST_WORKER = (
    "(raylet) A worker died. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer "
    "due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV.\n"
)


def evidence_of(text: str) -> CollectedEvidence:
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(text.encode()))
    return builder.build()


def activity_in(text: str) -> Activity | None:
    failure = evidence_of(text).failure
    assert failure is not None
    return failure.activity


def test_a_traceback_that_is_cut_explains_the_message_before_it() -> None:
    assert activity_in(f"{OOM}\nwandb: Waiting\n{TRACEBACK}") is Activity.OPTIMIZER


def test_a_traceback_of_another_rank_that_is_cut_explains_the_message() -> None:
    other = "".join(f"[rank6]: {line}\n" for line in TRACEBACK.splitlines())
    assert activity_in(f"[rank5]: {OOM}\n{other}") is Activity.OPTIMIZER


@pytest.mark.parametrize("below", ["ValueError: wrong shape\n", "    ~~~~^^^^\nKeyError: 'x'\n"])
def test_a_traceback_with_an_error_of_its_own_explains_nothing_else(below: str) -> None:
    assert activity_in(f"{TRACEBACK}{below}hello\nTraceback (most recent call last):\n{OOM}\n") is None
    assert activity_in(f"{OOM}\n{TRACEBACK}{below}") is None


def test_a_rank_without_a_stack_does_the_work_of_the_others() -> None:
    other = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. "
    same, emptier = (other + SIZES.format(gpu=1, allocated=held) + "\n" for held in (77.5, 20.0))
    assert activity_in(f"[rank5]: {OOM}\n{TRACEBACK}{same}") is Activity.OPTIMIZER
    assert activity_in(f"[rank5]: {OOM}\n{TRACEBACK}{emptier}") is None


def test_weights_that_are_being_loaded_explain_a_message() -> None:
    shards = "Loading checkpoint shards: {}%|###   | 1/3 [00:04<00:08]\n"
    assert activity_in(shards.format(33) + OOM) is Activity.MODEL_LOAD
    assert activity_in(shards.format(33) + shards.format(100) + OOM) is None
    assert activity_in(f"model_runner.py:1] Starting to load model x\n{OOM}") is Activity.MODEL_LOAD
    assert activity_in(f"Starting to load model x\nModel loading took 14 GiB\n{OOM}") is None
    assert activity_in(f"{shards.format(33)}step:3 - loss:0.5\n{OOM}") is None


@pytest.mark.parametrize(
    ("words", "activity"),
    [
        ("Failed to update parameter online: ", Activity.WEIGHT_SYNC),
        ("Failed to update the model weights: ", Activity.WEIGHT_SYNC),
        ("Error while loading the model weights: ", Activity.MODEL_LOAD),
        ("Failed to initialize executor on rank 0: ", Activity.ENGINE_WARM_UP),
        ("torch.OutOfMemoryError: ", None),
    ],
)
def test_a_message_names_its_activity(words: str, activity: Activity | None) -> None:
    assert activity_in(words + MESSAGE) is activity


def test_a_function_that_is_named_below_the_message_explains_it() -> None:
    named = "Exception occurred while running RolloutWorker's function sync_model_from_actor: the actor died\n"
    assert activity_in(f"{OOM}\n{named}") is Activity.WEIGHT_SYNC


def test_frames_between_arrows_are_a_stack() -> None:
    stack = "train.py:8 step -> torch/_tensor.py:623 backward\n  -> autograd/graph.py:979 _engine_run_backward\n"
    assert activity_in(stack + OOM) is Activity.BACKWARD


@pytest.mark.parametrize("escape", ["\x1b", "^[", "\\x1b", "␛", ""])
def test_colours_that_a_page_prints_as_text_are_removed(escape: str) -> None:
    failure = evidence_of(f"{escape}[1;36m(Worker rank=3 pid=812){escape}[0m {OOM}\n").failure
    assert failure is not None
    assert failure.rank == 3


def test_a_crash_is_no_shortage_although_ray_lists_the_killer() -> None:
    assert evidence_of(LOST_WORKER).failure is not None
    crashed = evidence_of(LOST_WORKER + "(Actor pid=4) *** SIGSEGV received at time=1718 on cpu 3 ***\n")
    assert crashed.failure is None
    assert crashed.failures == 0


def test_a_killed_process_beside_a_crash_is_a_shortage() -> None:
    failure = evidence_of("Segmentation fault (core dumped)\n[rank1]: exitcode: -9\n").failure
    assert failure is not None
    assert failure.kind is FailureKind.KILLED


@pytest.mark.parametrize(
    "line",
    [
        "core_client.py:359] Got fatal signal from worker processes, shutting down.",
        "Received sigquit from a child process.",
    ],
)
def test_an_engine_that_ends_itself_is_no_shortage(line: str) -> None:
    assert evidence_of(f"{line}\nKilled\n").failure is None
    failure = evidence_of(f"{line}\n[rank1]: exitcode: -9\n").failure
    assert failure is not None
    assert failure.kind is FailureKind.KILLED


def test_a_semaphore_without_space_is_a_full_dev_shm() -> None:
    frame = (
        'Traceback (most recent call last):\n  File "/usr/lib/multiprocessing/synchronize.py", line 57, in __init__\n'
    )
    failing = evidence_of(frame + "    sl = self._semlock = SemLock(\nOSError: [Errno 28] No space left on device\n")
    assert failing.failure is not None
    assert failing.failure.kind is FailureKind.SHARED_MEMORY


def test_a_probe_of_joblib_gives_way_to_a_failure() -> None:
    warning = "x.py:46: UserWarning: [Errno 28] No space left on device.  joblib will operate in serial mode\n"
    assert diagnose(evidence_of(warning))[0].failure_class is FailureClass.SHARED_MEMORY
    failure = evidence_of(warning + OOM).failure
    assert failure is not None
    assert failure.kind is FailureKind.ALLOCATOR
