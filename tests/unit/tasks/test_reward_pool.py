"""Rewards in processes of their own. The functions are modules that the workers import."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_memory.sample import MemorySample
from rljob_testing.patience import Deadline
from rljob_trainer.rollout_batch import Completion, Prompt
from rljob_trainer.tasks import reward_pool
from rljob_trainer.tasks.reward_pool import RewardPool
from rljob_trainer.tasks.reward_source import RewardSource
from rljob_trainer.tasks.rewards import Reward
from rljob_trainer.tasks.scoring import ChosenRewards, RewardFailure, ScoringHere

REWARDS = """
import os, re, sys, time

def length(answer, record):
    return len(answer) + record["offset"]

def slow(answer, record):
    time.sleep(0.05)
    return os.getpid()

def sometimes(answer, record):
    if answer == "hang":
        import subprocess
        with open(record["file"], "w") as file:
            file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(3600)
    if answer == "die":
        os._exit(7)
    if answer == "raise":
        raise LookupError("no such thing")
    return len(answer)

def spawned(answer, record):
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(length, (answer, record))

kept = []

def leaky(answer, record):
    kept.append(b"x" * (64 << 20))
    return os.getpid()

def modules(answer, record):
    return float("torch" in sys.modules or "vllm" in sys.modules or bool(os.environ.get("CUDA_VISIBLE_DEVICES")))
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    opened: list[RewardPool] = []

    def open_pool(reward: str, *, workers: int = 1, timeout: float = 60.0, **spec: Any) -> RewardPool:
        task = TaskSpec.model_validate({"name": "digits", "reward": f"rewards:{reward}", **spec})
        source, log = RewardSource(task, tmp_path, 0), tmp_path / "rewards.log"
        rewards = source.load() if reward != "missing" else [Reward("missing", len)]
        pool = RewardPool(source, rewards, workers=workers, timeout_seconds=timeout, log=log)
        opened.append(pool.__enter__())
        return pool

    yield open_pool
    for each in opened:
        each.close()


def completion(text: str) -> Completion:
    return Completion([1, 2], [-1.0, -1.0], True, text)


def results(pool: RewardPool, texts: list[str], record: dict[str, Any], *, stop: bool = False) -> list[Any]:
    scoring = pool.begin([Prompt(0, [1], "", record)], len(texts))
    scoring.add(0, [completion(text) for text in texts])
    [found] = scoring.results(stop_at_failure=stop)
    return found


def test_completions_may_be_added_in_parts_and_results_are_in_their_order(pool: Any) -> None:
    prompts = [Prompt(n, [1], "", {"offset": 10 * n}) for n in range(4)]
    scoring = pool("length", workers=3).begin(prompts, 80)
    texts = ["x" * (n % 7) for n in range(320)]
    for start in (160, 0):
        scoring.add(start, [completion(text) for text in texts[start : start + 160]])
    expected = [float(len(text) + 10 * (n // 80)) for n, text in enumerate(texts)]
    assert scoring.results(stop_at_failure=True) == [expected]


LENGTH = Reward("length", lambda answer, record: len(answer) + int(record["offset"]))


def test_completions_that_are_not_added_are_not_waited_for(pool: Any) -> None:
    for scorer in (pool("length"), ScoringHere([LENGTH])):
        scoring = scorer.begin([Prompt(n, [1], "", {"offset": 10 * n}) for n in range(2)], 2)
        scoring.add(2, [completion("ccc"), completion("")])
        assert scoring.results(stop_at_failure=False) == [[None, None, 13.0, 10.0]]
        assert ChosenRewards(scoring, [3, 2]).results(stop_at_failure=True) == [[10.0, 13.0]]


def test_a_call_that_hangs_or_dies_fails_alone_with_its_children(pool: Any, tmp_path: Path) -> None:
    failing = pool("sometimes", timeout=30)  # much more than a machine stalls: the other calls must not exceed it
    record = {"file": str(tmp_path / "child")}
    assert results(failing, ["a", "hang", "bb", "die", "ccc"], record) == [
        1.0,
        RewardFailure("took more than 30 s (task.rewardTimeoutSeconds)"),
        2.0,
        RewardFailure("ended its process with exit code 7"),
        3.0,
    ]
    assert results(failing, ["dddd"], {}) == [4.0]
    child = int((tmp_path / "child").read_text())
    until(lambda: not _is_running(child), "the child to end")


def test_an_answer_pattern_that_backtracks_ends_at_the_limit(pool: Any) -> None:
    answer = {"pattern": r"<answer>((?:\s*[^<]+\s*)+)</answer>"}
    hanging = pool("length", timeout=1, answer=answer)
    [failure] = results(hanging, ["<answer>" + "1 " * 40], {"offset": 0})
    assert failure == RewardFailure("took more than 1 s (task.rewardTimeoutSeconds)")


def test_the_first_failure_may_end_the_wait(pool: Any, tmp_path: Path) -> None:
    record = {"file": str(tmp_path / "child")}
    [failure, hanging] = results(pool("sometimes", timeout=600), ["raise", "hang"], record, stop=True)
    assert failure.message == "raised LookupError: no such thing"
    assert 'raise LookupError("no such thing")' in failure.traceback
    assert hanging is None, "it was not waited for"


def test_workers_are_added_while_slow_calls_wait(pool: Any) -> None:
    slow, seen = pool("slow", workers=3), set[float]()

    def all_have_worked() -> bool:
        workers = results(slow, ["x"] * 30, {})
        assert all(isinstance(worker, float) for worker in workers), workers
        seen.update(workers)
        assert len(seen) <= 3
        return len(seen) == 3

    until(all_have_worked, "all workers to load and to work")


def test_a_dropped_step_leaves_no_calls(pool: Any) -> None:
    begun = time.monotonic()
    slow = pool("slow")
    dropped = slow.begin([Prompt(0, [1], "", {})], 10_000)
    dropped.add(0, [completion("x")] * 10_000)
    assert len(results(slow, ["y"], {})) == 1
    assert time.monotonic() - begun < 300  # instead of 500 s


def test_workers_import_no_torch_see_no_gpu_and_spawn(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert results(pool("modules"), ["x"], {}) == [0.0]
    assert results(pool("spawned", timeout=600), ["abc"], {"offset": 1}) == [4.0]


class UnreadableResult:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_records_that_cannot_be_sent_and_missing_functions_are_refused(pool: Any) -> None:
    [failure] = results(pool("length"), ["x"], {"offset": UnreadableResult()})
    assert failure.message.startswith("could not get the record, which raised ValueError")
    with pytest.raises(BadInput, match="expected records that can be pickled"):
        results(pool("length"), ["x"], {"offset": lambda: 0})
    with pytest.raises(BadInput, match=r"cannot load .*expected a function missing in"):
        results(pool("missing"), ["x"], {})


def test_workers_end_with_the_pool_though_a_call_hangs(pool: Any) -> None:
    hanging = pool("sometimes", timeout=600)
    hanging.begin([Prompt(0, [1], "", {"file": os.devnull})], 1).add(0, [completion("hang")])
    until(lambda: hanging._workers, "a worker to start")
    [worker] = hanging._workers
    hanging.close()
    assert not _is_running(worker.process.pid)


@pytest.mark.parametrize(("used", "replaced"), [(95, True), (50, False)])
def test_a_worker_that_leaks_is_replaced_between_calls_once_memory_is_short(
    used: int, replaced: bool, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_pool, "host_memory", lambda: MemorySample(host_used_bytes=used, host_limit_bytes=100))
    monkeypatch.setattr(reward_pool, "_LOOK_EVERY_SECONDS", 0.0)
    leaking = pool("leaky")
    processes = {results(leaking, ["x"], {})[0] for _ in range(6)}
    assert (len(processes) > 1) is replaced


def until(holds: Callable[[], object], doing: str) -> None:
    deadline = Deadline(120)
    while not holds():
        assert not deadline.passed, f"waited too long for {doing}"
        time.sleep(0.01)


def _is_running(process: int) -> bool:
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return bool(status.stdout.strip()) and not status.stdout.startswith("Z")
