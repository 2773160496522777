"""Concurrent writes of one job: bounded, and stopped by a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rljob_operator.apply.waves import LARGEST_WAVE, in_waves
from rljob_operator.kube.errors import Forbidden
from rljob_operator.kube.lease import LeadershipLost


class Writes:
    """Counts writes, and how many run at once. `errors`: by the number of the write."""

    def __init__(self, errors: dict[int, Exception] | None = None) -> None:
        self.errors = errors or {}
        self.begun: list[int] = []
        self.finished: list[int] = []
        self.widths: list[int] = []

    async def write(self, number: int) -> None:
        self.begun.append(number)
        self.widths.append(len(self.begun) - len(self.finished))
        await asyncio.sleep(0)
        self.finished.append(number)
        if number in self.errors:
            raise self.errors[number]

    def run(self, count: int, first: int) -> None:
        asyncio.run(in_waves([lambda n=n: self.write(n) for n in range(count)], first))  # type: ignore[misc]


@pytest.mark.parametrize(("count", "first", "widest"), [(0, 4, 0), (3, 4, 3), (100, 4, 16), (1024, 16, LARGEST_WAVE)])
def test_every_write_runs_once_and_few_at_a_time(count: int, first: int, widest: int) -> None:
    writes = Writes()
    writes.run(count, first)
    assert sorted(writes.finished) == list(range(count))
    assert max(writes.widths, default=0) == widest


def failed(errors: dict[int, Exception]) -> tuple[Exception, Sequence[int]]:
    writes = Writes(errors)
    with pytest.raises(tuple(type(error) for error in errors.values())) as raised:
        writes.run(1000, 4)
    return raised.value, writes.finished


def test_a_refused_job_costs_one_wave() -> None:
    error, finished = failed({1: Forbidden("exceeded quota"), 3: Forbidden("exceeded quota, too")})
    assert str(error) == "exceeded quota"
    assert finished == [0, 1, 2, 3]


def test_lost_leadership_is_the_error_that_counts() -> None:
    error, _ = failed({0: Forbidden("exceeded quota"), 2: LeadershipLost("late")})
    assert isinstance(error, LeadershipLost)
