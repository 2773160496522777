"""Exit of a worker."""

from __future__ import annotations

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_trainer.pods.head_watch import HEAD_GONE_SECONDS, HeadWatch, Observed


@pytest.fixture
def watch() -> HeadWatch:
    return HeadWatch("digits-controller.train.svc:6379", now=100.0)


def seen(*, head: bool = True, raylet: bool = True, controller_ended: bool = False) -> Observed:
    return Observed(head, raylet, controller_ended)


def test_a_worker_stays_while_the_head_answers(watch: HeadWatch) -> None:
    assert all(watch.check(seen(), now) is None for now in range(100, 10_000, 100))


def test_a_short_silence_of_the_head_is_tolerated(watch: HeadWatch) -> None:
    assert watch.check(seen(head=False), 100 + HEAD_GONE_SECONDS - 1) is None
    assert watch.check(seen(), 100 + HEAD_GONE_SECONDS) is None
    assert watch.check(seen(head=False), 100 + 2 * HEAD_GONE_SECONDS - 1) is None


def test_a_head_that_stays_silent_is_gone(watch: HeadWatch) -> None:
    ending = watch.check(seen(head=False), 100 + HEAD_GONE_SECONDS)
    assert ending is not None
    assert ending.exit_code == ExitCode.WORKER_LOST
    assert "digits-controller.train.svc:6379 has not answered for 15 s" in ending.message


def test_a_raylet_that_ends_after_its_head_is_not_the_failure(watch: HeadWatch) -> None:
    assert watch.check(seen(head=False, raylet=False), 100 + HEAD_GONE_SECONDS - 1) is None


def test_a_raylet_that_ends_beside_a_head_is(watch: HeadWatch) -> None:
    ending = watch.check(seen(raylet=False), 101)
    assert ending is not None
    assert ending.exit_code == ExitCode.WORKER_LOST


def test_a_worker_completes_once_an_announced_exit_of_the_head_happens(watch: HeadWatch) -> None:
    assert watch.check(seen(controller_ended=True), 101) is None
    assert watch.check(seen(controller_ended=True, raylet=False), 102) is None
    ending = watch.check(seen(controller_ended=True, head=False, raylet=False), 103)
    assert ending is not None
    assert ending.exit_code == ExitCode.COMPLETE


def test_a_kill_by_the_kernel_is_the_cause_of_the_end_of_ray(watch: HeadWatch) -> None:
    ending = watch.check(Observed(head=True, raylet=False, controller_ended=False, oom_kills=2), 101)
    assert ending is not None
    assert ending.exit_code == ExitCode.HOST_OUT_OF_MEMORY
    assert "the kernel killed 2 of this container's processes" in ending.message
