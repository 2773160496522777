"""No input ends a parser of what others write, other than as documented. `make fuzz FUZZ_SECONDS=3600` takes longer."""

from __future__ import annotations

import secrets

import pytest

from rljob_testing.fuzz.run import FuzzFailure, fuzz
from rljob_testing.fuzz.targets import TARGETS, Target

SECONDS = 60.0


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_any_input(name: str) -> None:
    assert fuzz(TARGETS[name], SECONDS / len(TARGETS), secrets.randbits(32)).inputs > len(TARGETS[name].seeds)


def test_a_failure_names_the_input_and_the_seed() -> None:
    def check(data: bytes) -> None:
        assert data == b"seed"

    with pytest.raises(FuzzFailure, match="AssertionError for input 1 of seed 7"):
        fuzz(Target(check, (b"seed",)), 5, seed=7)
