"""The programs that run out of memory on purpose."""

from __future__ import annotations

from collections import Counter

from rljob_memory.diagnosis import FailureClass
from rljob_testing.induced_failures.catalogue import programs


def test_each_class_of_failure_has_at_least_two_programs() -> None:
    counts = Counter(program.failure_class for program in programs())
    assert {failure_class for failure_class in FailureClass if counts[failure_class] < 2} == set()


def test_every_program_has_a_docstring() -> None:
    assert [program.title for program in programs() if not program.run.__doc__] == []
